"""Draft models with another tokenizer than the target: vocabulary alignment, retokenising, drafts in the target's ids.

    alignment.py     which ids of two tokenizers mean the same bytes; a growing text in the other tokenizer's ids
    draft_cache.py   sequences in the draft model's ids, in a cache of their own
    rollout.py       the two translation modes, tli and slem

The drafter `model` uses it where the vocabularies differ. What is drafted is always in the target's vocabulary.
"""
