"""Early exit: the target's first layers draft, and verification continues from their states (LayerSkip, Kangaroo).

Promise: everything about the method is in this folder; deleting it deletes the method.
"""

from .drafter import EarlyExit as EarlyExit
