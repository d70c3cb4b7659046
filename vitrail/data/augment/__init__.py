"""Random changes of training images."""
