"""Weights on disk: our one file, and the layouts of others."""
