"""What is loaded: checkpoints, configurations, tokenizers, chat templates, weights, fetching, paths.

Start with `checkpoint.open_checkpoint`. Promise: what it returns is complete and fits together, or a ModelError says
what is wrong and what to do. Nothing here runs a pass, and nothing here imports `backends`, `engine` or `drafters`.
"""
