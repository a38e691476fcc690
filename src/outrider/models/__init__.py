"""What is loaded: checkpoints, configurations, tokenizers, chat templates, weights, and where files are kept.

Promise: what is returned is complete and fits together, or the error says what is wrong and what to do. Nothing here
runs a pass; that is `backends`.
"""
