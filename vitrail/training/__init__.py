"""Loss -> weights."""
