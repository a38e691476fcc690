"""Trained heads: a small network trained for the target drafts from its hidden states (EAGLE-3, block heads).

Network, int8 form, captured passes, trees and shipped weights. Promise: everything about running a trained head is in
this folder; deleting it deletes the method.
"""

from .drafter import TrainedHead as TrainedHead, head_for as head_for
