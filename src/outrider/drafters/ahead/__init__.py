"""Drafting ahead: the next round is drafted while the target verifies this one (arXiv 2603.03251).

    drafter.py       the drafter `ahead`: looks up a prepared draft, else falls back
    setup.py         which model prepares, and in which thread, process or stream
    statistics.py    which outcomes to prepare for, how deep, and whether drafting ahead pays
    forks.py         a draft model that prepares for many outcomes at once, in a cache of its own
    head_forks.py    the same with a trained head
    shared_queue.py  requests and responses in shared memory, for a thread and a process alike
    worker.py        the loop that answers requests, and the hosts that start and supervise it

Promise: deleting this folder deletes the method, and nothing here can change a text: a prepared draft is verified like
any other.
"""

from .drafter import Ahead as Ahead
