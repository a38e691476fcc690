"""What Outrider made, handed to another engine: the drafter in its format, its configuration, its command line.

Nothing here needs that engine to be installed, and nothing here runs a model.
"""
