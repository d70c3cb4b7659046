"""Numbers and arrays -> pictures and pages."""
