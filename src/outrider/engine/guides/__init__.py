"""Structured output: JSON schemas, regular expressions and grammars as the set of tokens that may come next.

Promise: a guided text has the requested form, with and without speculation. It knows grammars and token ids; it sees
neither logits nor drafts.
"""

from .matcher import Guide as Guide, guide_for as guide_for
