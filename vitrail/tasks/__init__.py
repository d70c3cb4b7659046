"""Logits -> loss."""
