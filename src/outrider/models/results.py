"""Answers: text, tokens and counters of a request, and how they show themselves in a terminal and in a notebook.

    print(result)        the text
    repr(result)         one line: text, passes, τ, α
    rich.print(result)   the text coloured by origin, and the counters
    a notebook           the same, and the passes beside those of plain decoding

Everything shown is counted, nothing is estimated: plain decoding takes one pass for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import Any

from ..types import ACCEPTED, Stats, TokenLogprob

_SHOWN = 60  # characters of a text in one line
_FILL = "background:rgba(0,160,110,.25);border-radius:2px"  # accepted tokens; readable on light and dark
_BAR = "height:.6em;border-radius:2px;min-width:2px"


@dataclass(frozen=True, repr=False)
class Completion:
    """One answer."""

    text: str
    token_ids: list[int]
    finish_reason: str
    origins: str  # one letter per token: a (accepted) or b (bonus)
    stats: Stats
    seed: int
    logprobs: list[TokenLogprob] | None = None
    texts: list[str] = field(default_factory=list)  # the text that each token released; joined, they are `text`

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else self.text[: _SHOWN - 1] + "…"
        return f"Completion({text!r}, {_counts(self)})"

    def __rich__(self) -> Any:
        from rich.text import Text

        text = Text()
        for text_part, accepted in self._runs():
            text.append(text_part, "green" if accepted else "")
        return text.append(f"\n{_counts(self)}", "dim")

    def _repr_html_(self) -> str:
        spans = (f'<span style="{_FILL}">{escape(text)}</span>' if a else escape(text) for text, a in self._runs())
        text = f'<div style="white-space:pre-wrap">{"".join(spans)}</div>'
        facts = f'<div style="opacity:.7;font-size:85%">{escape(_counts(self))}</div>'
        return f"<div>{text}{facts}{self._race()}</div>"

    def _runs(self) -> Iterator[tuple[str, bool]]:
        """Stretches of text of one origin, and whether they were accepted from drafts."""
        origins = zip(self.texts, self.origins, strict=True) if self.texts else [(self.text, "")]
        for accepted, run in groupby(origins, key=lambda pair: pair[1] == ACCEPTED):
            yield "".join(text for text, _ in run), accepted

    def _race(self) -> str:
        """The passes of this answer beside those of plain decoding."""
        steps, tokens = self.stats.steps, self.stats.emitted
        if not tokens:
            return ""
        rows = []
        for name, passes, colour in (
            ("plain", tokens, "rgba(128,128,128,.5)"),
            ("this run", steps, "rgba(0,160,110,.7)"),
        ):
            bar = f'<div style="{_BAR};width:{100 * passes / max(tokens, steps):.1f}%;background:{colour}"></div>'
            label = f'<td style="text-align:right">{name}, {passes} passes</td>'
            rows.append(f'<tr>{label}<td style="width:16em;text-align:left">{bar}</td></tr>')
        return f'<table role="img" aria-label="Passes" style="font-size:85%"><tbody>{"".join(rows)}</tbody></table>'


@dataclass(frozen=True, repr=False)
class Result:
    """All answers to one prompt; the first one's fields can be read directly: `result.text`."""

    prompt: str
    prompt_token_ids: list[int]
    outputs: list[Completion]

    def __getattr__(self, name: str) -> Any:
        if name in Completion.__dataclass_fields__:
            return getattr(self.outputs[0], name)
        raise AttributeError(name)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.outputs))

    def __repr__(self) -> str:
        return f"Result({', '.join(map(repr, self.outputs))})"

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*(output.__rich__() for output in self.outputs))

    def _repr_html_(self) -> str:
        return "<hr>".join(output._repr_html_() for output in self.outputs)


def _counts(answer: Completion) -> str:
    stats = answer.stats
    parts = [f"{len(answer.token_ids)} tokens", f"{stats.steps} passes"]
    parts += [] if stats.tau is None else [f"τ {stats.tau:.2f}"]
    parts += [] if stats.alpha is None else [f"α {stats.alpha:.2f}"]
    return ", ".join([*parts, answer.finish_reason or "not ended"])
