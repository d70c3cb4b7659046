"""Data augmentation of training images."""
