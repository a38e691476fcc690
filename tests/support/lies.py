"""Configurations in which one value is not what it should be."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

VALUES = (None, "x", -1, 0, 3, 1 << 40, 1.5, float("inf"), True, [], {}, [1, 2, 3], [None])


def lies(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each key, of what is nested too, left out and with each of `VALUES`."""
    for path in _paths(data):
        for value in (..., *VALUES):
            changed = copy.deepcopy(dict(data))
            holder: dict[str, Any] = changed
            for key in path[:-1]:
                holder = holder[key]
            if value is ...:
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            yield changed


def _paths(data: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in _paths(value))
