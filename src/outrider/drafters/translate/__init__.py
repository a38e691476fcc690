"""Draft models with another tokenizer: vocabulary alignment, retokenising, and drafts in the target's ids.

Promise: what is drafted is in the target's vocabulary. Used by the drafter `model`, which finds out by itself when it
is needed.
"""
