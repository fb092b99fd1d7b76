"""Reading and writing files: whole or not at all, up to a limit, without secrets."""
