"""One step of lossless speculation; start reading at `step.py`.

Promise: the emitted tokens are those of the target alone, whatever the drafter does. The engine knows token ids, not
text; it names no drafting method and no device.
"""
