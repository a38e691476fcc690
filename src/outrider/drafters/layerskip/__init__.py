"""Layer skipping: the target drafts with some of its own attention and MLP blocks skipped (Draft & Verify, SWIFT).

Deleting this folder deletes the method. `outrider tune` finds the set of blocks for a target with `search.py`.
"""

from .drafter import LayerSkip as LayerSkip
