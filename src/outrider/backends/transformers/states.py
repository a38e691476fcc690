"""What a transformers model remembers between passes: copied, cut, and kept under the very tokens it stands for.

A state is transformers' own cache object. Its updates make new tensors and leave the old ones alone, so a copy is a few
references. `States` is a trie of blocks of tokens: whoever asks with the same source and the same tokens in the same
blocks gets the same state, whichever request, engine or drafter made it. It knows nothing of models, and losing a state
costs only time.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_MOST = 4096  # states, however short
Grid = Callable[[int], int]  # where the block that begins here ends
Source = tuple[int, ...]  # ids of the text that an encoder read; () where there is none


def empty(two_sided: bool) -> Any:
    """A state before the first token. Every layer keeps all of its keys: a window is the mask's business."""
    from transformers import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if two_sided else DynamicCache()


def copied(state: Any) -> Any:
    """The same state for somebody who will go on from it."""
    twin = copy.copy(state)
    if hasattr(state, "self_attention_cache"):
        twin.self_attention_cache = copied(state.self_attention_cache)
        twin.cross_attention_cache = copied(state.cross_attention_cache)
        twin.is_updated = dict(state.is_updated)
        return twin
    twin.layers = [copy.copy(layer) for layer in state.layers]
    return twin


def cut(state: Any, length: int) -> Any:
    """A copy that holds the first `length` tokens; what was computed from the source stays."""
    twin = copied(state)
    own = getattr(twin, "self_attention_cache", twin)
    for layer in own.layers:
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return twin


def can_be_cut(state: Any) -> bool:
    """Whether its layers keep keys and values for every token, and nothing else."""
    from transformers.cache_utils import DynamicLayer

    own = getattr(state, "self_attention_cache", state)
    return bool(own.layers) and all(type(layer) is DynamicLayer and layer.is_initialized for layer in own.layers)


class _Node:
    """After one more block of tokens."""

    def __init__(self, parent: _Node | None, block: tuple[int, ...]) -> None:
        self.parent, self.block = parent, block
        self.length: int = 0 if parent is None else parent.length + len(block)
        self.after: dict[tuple[int, ...], _Node] = {}
        self.state: Any = None


class States:
    """States after whole blocks of tokens. When they get too many, those that were used longest ago are dropped."""

    def __init__(self) -> None:
        self._roots: dict[Source, _Node] = {}
        self._used: OrderedDict[_Node, Source] = OrderedDict()  # nodes with a state, the latest last

    @property
    def tokens(self) -> int:
        """How many tokens all the states hold."""
        return sum(node.length for node in self._used)

    def longest(self, source: Source, tokens: list[int], most: int, grid: Grid) -> tuple[int, Any]:
        """The state of as many leading tokens as possible, up to `most`: (how many, the state or None)."""
        node: _Node | None = self._roots.get(source)
        best = None
        while node is not None:
            if node.state is not None:
                best = node
            at, stop = node.length, grid(node.length)
            node = node.after.get(tuple(tokens[at:stop])) if stop <= most else None
        if best is None:
            return 0, None
        self._used.move_to_end(best)
        return best.length, best.state

    def put(self, source: Source, tokens: list[int], state: Any, most: int, grid: Grid) -> None:
        """Keep the state after these tokens, whole blocks of them; all states together hold at most `most` tokens."""
        node = self._roots.setdefault(source, _Node(None, ()))
        while node.length < len(tokens):
            block = tuple(tokens[node.length : grid(node.length)])
            node = node.after.setdefault(block, _Node(node, block))
        node.state = state
        self._used[node] = source
        self._used.move_to_end(node)
        while len(self._used) > 2 and (self.tokens > most or len(self._used) > _MOST):
            self._drop()

    def _drop(self) -> None:
        node, source = self._used.popitem(last=False)
        node.state = None
        while node.parent is not None and node.state is None and not node.after:
            del node.parent.after[node.block]
            node = node.parent
        if node.parent is None and node.state is None and not node.after:
            self._roots.pop(source, None)
