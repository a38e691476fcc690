"""How many examples hypothesis tries: all with `--hypothesis-profile=all` (`make test-all`), a third every day."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

settings.register_profile("everyday", deadline=None)
settings.register_profile("all", deadline=None)
settings.load_profile("everyday")  # the command line's choice comes later


def examples(count: int, **more: Any) -> settings:
    every = settings.get_current_profile_name() == "all"
    return settings(max_examples=count if every else -(-count // 3), deadline=None, **more)
