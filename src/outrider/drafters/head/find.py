"""Which trained head goes with a target: one of the user's own, or one that comes with Outrider.

Promise: a head is found by its target's hash alone, whatever the files are called; the user's come first. It reads
configurations, never weights, and what cannot be read is as if it were not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ...models.paths import cache_folder
from ...models.speculators import CONFIG, read_config

HEADS = ("eagle3", "block")  # an early exit's adapter is no head
SHIPPED = Path(__file__).parent / "shipped"


def head_for(target: Any) -> Path | None:
    """The folder of a head for this model, if there is one."""
    identity = target.identity()
    if identity is None:
        return None
    for folder in _folders():
        try:
            config = read_config(folder)
        except ModelError:
            continue
        if config.kind in HEADS and config.target_hash == identity:
            return folder
    return None


def _folders() -> Iterator[Path]:
    for place in (cache_folder() / "heads", SHIPPED):
        yield from sorted(path.parent for path in place.glob(f"*/{CONFIG}"))
