"""A drafter that learns while it serves (Draft, Verify, Improve), and a monitor that says when one has gone stale.

What is learnt is the drafter's alone: the target's weights and K/V are read, never written, so the text cannot change.
Nothing in here knows the engine, sequences or text; `drafters/online.py` brings them together.
"""
