"""Pixels -> logits: the networks of the paper, readable as its Figure 1."""
