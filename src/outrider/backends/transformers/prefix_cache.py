"""A prefix cache for transformers models: K/V states that are copied, truncated and found by their tokens.

A state is transformers' own cache object. Its updates make new tensors and leave the old ones unchanged, so a copy is a
few references. `PrefixCache` is a trie of blocks of tokens: the same source and the same tokens in the same blocks give
the same state, whichever request or drafter made it. It knows nothing of models; losing a state costs only time.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_MAX_STATES = 4096
Grid = Callable[[int], int]  # start of a block -> its end
Source = tuple[int, ...]  # the encoder's ids; () without an encoder


def empty(two_sided: bool) -> Any:
    """A state before the first token. Every layer keeps all of its keys: the mask implements a window."""
    from transformers import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if two_sided else DynamicCache()


def copied(state: Any) -> Any:
    """A copy that can be extended without changing the original."""
    twin = copy.copy(state)
    if hasattr(state, "self_attention_cache"):
        twin.self_attention_cache = copied(state.self_attention_cache)
        twin.cross_attention_cache = copied(state.cross_attention_cache)
        twin.is_updated = dict(state.is_updated)
        return twin
    twin.layers = [copy.copy(layer) for layer in state.layers]
    return twin


def truncated(state: Any, length: int) -> Any:
    """A copy that holds the first `length` tokens; cross-attention's part stays."""
    twin = copied(state)
    own = getattr(twin, "self_attention_cache", twin)
    for layer in own.layers:
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return twin


def can_truncate(state: Any) -> bool:
    """Whether its layers hold keys and values of every token, and nothing else."""
    from transformers.cache_utils import DynamicLayer

    own = getattr(state, "self_attention_cache", state)
    return bool(own.layers) and all(type(layer) is DynamicLayer and layer.is_initialized for layer in own.layers)


class _Node:
    """A prefix: its parent's tokens and one more block."""

    def __init__(self, parent: _Node | None, block: tuple[int, ...]) -> None:
        self.parent, self.block = parent, block
        self.length: int = 0 if parent is None else parent.length + len(block)
        self.children: dict[tuple[int, ...], _Node] = {}
        self.state: Any = None


class PrefixCache:
    """States after whole blocks of tokens. The least recently used are dropped when there are too many."""

    def __init__(self) -> None:
        self._roots: dict[Source, _Node] = {}
        self._used: OrderedDict[_Node, Source] = OrderedDict()  # nodes with a state, least recently used first

    @property
    def tokens(self) -> int:
        """Number of tokens that all states hold."""
        return sum(node.length for node in self._used)

    def longest(self, source: Source, tokens: list[int], most: int, grid: Grid) -> tuple[int, Any]:
        """The state of the longest stored prefix of at most `most` tokens: (its length, the state or None)."""
        node: _Node | None = self._roots.get(source)
        best = None
        while node is not None:
            if node.state is not None:
                best = node
            start, stop = node.length, grid(node.length)
            node = node.children.get(tuple(tokens[start:stop])) if stop <= most else None
        if best is None:
            return 0, None
        self._used.move_to_end(best)
        return best.length, best.state

    def put(self, source: Source, tokens: list[int], state: Any, most: int, grid: Grid) -> None:
        """Store the state after these tokens (whole blocks); all states together hold at most `most` tokens."""
        node = self._roots.setdefault(source, _Node(None, ()))
        while node.length < len(tokens):
            block = tuple(tokens[node.length : grid(node.length)])
            node = node.children.setdefault(block, _Node(node, block))
        node.state = state
        self._used[node] = source
        self._used.move_to_end(node)
        while len(self._used) > 2 and (self.tokens > most or len(self._used) > _MAX_STATES):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        node, source = self._used.popitem(last=False)
        node.state = None
        while node.parent is not None and node.state is None and not node.children:
            del node.parent.children[node.block]
            node = node.parent
        if node.parent is None and node.state is None and not node.children:
            self._roots.pop(source, None)
