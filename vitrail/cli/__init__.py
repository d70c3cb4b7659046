"""The command line: thin subcommands over `vitrail.runs`."""
