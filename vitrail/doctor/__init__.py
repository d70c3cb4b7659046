"""Find problems in a dataset."""
