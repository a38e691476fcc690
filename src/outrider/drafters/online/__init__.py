"""A drafter that learns while it serves (Draft, Verify, Improve).

Promise: only the drafter's own weights are trained; the target's weights and K/V are read, never written, so the text
cannot change. Deleting this folder deletes the method.
"""

from .drafter import Online as Online
