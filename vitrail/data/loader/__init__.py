"""Samples -> batches on the device."""
