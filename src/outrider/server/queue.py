"""Who is next: clients take turns, and each client's answers go in the order they came.

One client that asks for a hundred answers delays another's single one by one place, not by a hundred. The queue knows
clients and answers, not what they want. It is not locked: its owner is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()  # the first client is the next to be served

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for item in line)

    def put(self, client: str, item: T) -> None:
        self._lines.setdefault(client, deque()).append(item)

    def take(self) -> T:
        client, line = next(iter(self._lines.items()))
        item = line.popleft()
        if line:
            self._lines.move_to_end(client)
        else:
            del self._lines[client]
        return item

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take out all that are unwanted, and say which they were."""
        gone = [item for item in self if unwanted(item)]
        lines = ((client, deque(i for i in line if not unwanted(i))) for client, line in self._lines.items())
        self._lines = OrderedDict((client, line) for client, line in lines if line)
        return gone
