"""The command line: thin subcommands over `vitrail.commands`."""
