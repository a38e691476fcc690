"""Trained heads (EAGLE-3 and block heads): network, int8 form, captured passes, trees, shipped weights.

Promise: everything about running a trained head is in this folder; deleting it deletes the method.
"""

from .drafter import TrainedHead as TrainedHead, head_for as head_for
