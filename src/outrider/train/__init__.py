"""Make a drafter for a target from the target's own answers.

run         a whole run in order; start here          recipe      its options
prompts     prompt files, or prompts by the target    answers     what is generated, and its file
generation  answers from the engine, one process or a pool
batches     answers as tensors, draft vocabulary      decoder     the target as a differentiable module
networks    heads and exit adapters                   objectives  losses and hits
loop        steps, evaluation, checkpoints            report      the model card and the HTML report

It knows the format of drafter files (`models.speculators`), not the drafters that read them.
"""
