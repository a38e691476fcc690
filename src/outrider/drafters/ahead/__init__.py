"""Drafting ahead: the next round is drafted while the target verifies this one (arXiv 2603.03251).

    drafter.py       the drafter `ahead`: lookup of a prepared outcome, fallbacks, statistics
    setup.py         which model prepares, and in which thread, process or stream
    curve.py         which outcomes are worth preparing for
    forks.py         a draft model that prepares for many outcomes at once, in a cache of its own
    laws.py          what drafts are drawn from, under the rules that need q
    shared_queue.py  ids and lengths in shared memory, the same for a thread and a process
    channel.py       the engine's side of it: sequences and requests
    worker.py        the loop that reads requests and publishes answers, depth by depth
    worker_host.py   where that loop runs, and what happens when it dies or hangs
    worth.py         whether drafting ahead pays

Promise: deleting this folder deletes the method. Nothing here can change a text: what was prepared is verified like any
other draft.
"""

from .drafter import Ahead as Ahead
