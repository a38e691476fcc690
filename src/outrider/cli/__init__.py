"""The command line: one module per command group, registered explicitly in `app.py`. It parses and prints; the work
is done by the library."""
