"""The command line: one module per command group, registered in `app.py`; shared parts are in `common.py`.

The commands parse options, call the library and print. They decide nothing about decoding, and nothing imports them.
`outrider --help` does not load torch: modules that need it are imported inside the commands.
"""
