"""Weights and images -> logits or features."""
