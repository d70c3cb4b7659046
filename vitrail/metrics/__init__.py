"""Metrics: pure functions from logits or features to numbers."""
