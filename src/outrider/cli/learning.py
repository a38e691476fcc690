"""--learn on the command line: which drafter learns, what it starts from, and where it is kept afterwards.

It knows folders and options. Nothing is kept unless somebody said --learn, and `outrider drafter forget` removes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..llm import LLM

_CAN_LEARN = (None, "online", "head")


@dataclass(frozen=True)
class Teaching:
    """What the options say: None is nothing."""

    learn: bool | None = None
    source: Path | None = None  # --learn-from
    target: Path | None = None  # --learn-to

    @property
    def learns(self) -> bool:
        return self.learn is True or (self.learn is None and self.target is not None)

    def asked(self, given: dict[str, Any], model: str | None) -> dict[str, Any]:
        """The library's arguments with what these options mean for the drafter."""
        if self.learn is None and self.source is None and self.target is None:
            return given
        if self.learn is False and self.target is not None:
            raise ConfigError("--no-learn and --learn-to contradict each other: leave one out.")
        if given.get("drafter") not in _CAN_LEARN:
            if self.learn is False and self.source is None:
                return given  # it would not have learnt anyway
            raise ConfigError(
                f"The drafter '{given['drafter']}' cannot learn while it serves: leave --drafter out, or give online "
                f"or head."
            )
        from ..drafters.online import store  # torch comes with it

        asked = given | {"drafter": "online", "learn": self.learns}
        kept = store.kept_folder(name_of(model), given)
        source = self.source or (
            kept if self.learns and self.target is None and (kept / store.FACTS).exists() else None
        )
        if source is not None:
            asked["learn_from"] = str(source)
        return asked

    def keep(self, llm: LLM) -> None:
        """Write what was learnt, and the note about acceptance."""
        llm.drift.keep()
        if self.learns and llm.learning is not None:
            from ..drafters.online import store

            llm.save_learnt(self.target or store.kept_folder(llm.name, llm.config.options))


def name_of(model: str | None) -> str:
    """As the loaded model will call itself."""
    from ..models.checkpoint import open_checkpoint

    return open_checkpoint(model).name
