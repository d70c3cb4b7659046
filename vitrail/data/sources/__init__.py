"""What lies at a path: every kind of data as one catalogue of images, before any is opened."""
