"""How much to draft: the cost of a pass, the acceptance of drafts, and the decision between them.

Promise: nothing is drafted where plain decoding is expected to be faster, and the reason is given in words. It sees
counts, seconds and probabilities, never tokens or text.
"""
