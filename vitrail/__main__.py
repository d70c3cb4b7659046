"""`python -m vitrail`."""

from vitrail.cli.main import main

main()
