"""Logits and features -> numbers."""
