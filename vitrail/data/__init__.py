"""Files -> batches of pixels."""
