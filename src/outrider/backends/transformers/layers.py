"""Inside a transformers model, without knowing which: its decoder's layers, seen through and left out.

Layers are found by their number: a list of modules as long as the configuration says. What one says is read by a hook;
one that is to be left out is replaced by a stand-in for the length of a pass. Nothing is changed for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def find_layers(module: Any, count: int) -> nn.ModuleList | None:
    """The decoder's layers, first to last; None where nothing looks like them."""
    decoder = module.get_decoder() if hasattr(module, "get_decoder") else module
    for part in (decoder if decoder is not None else module).modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    return None


@contextmanager
def tapped(layers: nn.ModuleList | None, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """What comes out of these layers in the pass that runs meanwhile: layer -> [T, H]."""
    heard: dict[int, Tensor] = {}
    hooks = []
    for tap in taps:
        assert layers is not None

        def listen(layer: Any, given: Any, said: Any, tap: int = tap) -> None:
            heard[tap] = (said[0] if isinstance(said, tuple) else said)[0].float()

        hooks.append(layers[tap].register_forward_hook(listen))
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


class _Absent(nn.Module):
    """In a layer's place: hands on what it is given, and beside it what the last layer that ran handed on."""

    def __init__(self, layer: nn.Module, last: dict[str, Any]) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not as a part of this one: it must not be found twice
        object.__setattr__(self, "last", last)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "layer"), name)  # models ask layers for their kind

    def forward(self, *given: Any, **named: Any) -> Any:
        states = given[0] if given else named["hidden_states"]
        said = self.last.get("said")
        return (states, *said[1:]) if isinstance(said, tuple) else states


@contextmanager
def without(layers: nn.ModuleList | None, absent: frozenset[int]) -> Iterator[None]:
    """For as long as this lasts, these layers are left out. The first one stays: it counts the tokens for all."""
    absent = absent - {0}
    if layers is None or not absent:
        yield
        return
    last: dict[str, Any] = {}
    kept = {i: layers[i] for i in absent}
    hooks = [
        layer.register_forward_hook(lambda layer, given, said: last.update(said=said))
        for i, layer in enumerate(layers)
        if i not in absent
    ]
    try:
        for i, layer in kept.items():
            layers[i] = _Absent(layer, last)
        yield
    finally:
        for i, layer in kept.items():
            layers[i] = layer
        for hook in hooks:
            hook.remove()
