"""The command line: arguments, help and printing of the functions in `vitrail.commands`."""
