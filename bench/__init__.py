"""Speed side by side with other libraries: `python -m bench`."""
