"""The composition root: one file per command, config -> objects -> work."""
