"""What each command does, one file per command; no command imports another."""
