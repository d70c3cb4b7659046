"""Kernels written by hand, where a library has none that is as fast and repeats bit for bit."""
