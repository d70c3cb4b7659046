"""`python -m vitrail`."""

from vitrail.cli import main

main()
