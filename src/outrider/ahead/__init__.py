"""Drafting the next round while the target verifies this one: what the drafter `ahead` is made of.

    curve.py    which outcomes are worth preparing for: acceptance and miss rates, measured, and the forks they buy
    forks.py    a draft model that prepares for them, all at once, in a cache of its own
    head_forks.py   the same with a trained head, which goes on from its own outputs
    laws.py     what drafts are drawn from, under the rules that want to know
    mail.py     ids and lengths in shared memory, the same for a thread and a process
    worker.py   who prepares: a loop that reads requests and publishes answers, depth by depth
    place.py    where that loop runs, and what happens when it dies or hangs
    worth.py    whether all this pays

Nothing here can change a text: what was prepared is verified like any other draft.
"""
