"""Readers of every kind of data at a path. Each returns a `DataSource`, before any image is opened."""
