"""Explanations as arrays: attention maps and distances, relevance, rollout, filters, and faithfulness."""
