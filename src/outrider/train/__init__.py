"""Make a drafter for a target: the target's own answers, features, losses, the loop, and the folder it ends in.

questions   prompt files -> conversations' ids            answers    what the target says to them, on disk
features    the target as a plain torch module            net        the head as a trainable module
objectives  what is minimised, and what counts as a hit   loop       steps, checkpoints, curves
evaluate    acceptance by position on held-out answers    distil     a small model cut from the target
recipe      all of it in order                            card, report   what is said about the result
"""
