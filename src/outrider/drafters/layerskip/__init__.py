"""Layer skipping: the target drafts with some of its blocks left out (Draft & Verify, SWIFT).

Promise: everything about the method is in this folder; deleting it deletes the method.
"""

from .drafter import LayerSkip as LayerSkip
