"""The model card: what a drafter is, whose it is, what it was made from and how well it does.

Promise: it says nothing that is not in the result of the training. It knows words, not files.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
_USE = {
    "eagle3": "outrider generate --model TARGET --drafter head --set head=THIS_FOLDER",
    "block": "outrider generate --model TARGET --drafter head --set head=THIS_FOLDER",
    "exit": "outrider generate --model TARGET --drafter exit --set adapter=THIS_FOLDER",
    "model": "outrider generate --model TARGET --drafter model --draft-model THIS_FOLDER",
}
_WHAT = {
    "eagle3": "an EAGLE-3 head: one layer on fused features of the target, drafting token after token",
    "block": "a block drafter: masks after the target's last features, filled in by one pass",
    "exit": "an early exit: a small adapter that guesses from the target's first layers, which verification then need "
    "not run again",
    "model": "a small standalone model: a few layers of the target, distilled from the whole of it",
}


def card(result: Json) -> str:
    """Markdown with Hugging Face's header."""
    target, recipe = result["target"], result["recipe"]
    parts = [
        f"---\nlibrary_name: outrider\nbase_model: {target['name']}\ntags:\n- speculative-decoding\n- drafter\n---",
        f"# A drafter for {target['name']}",
        f"It is {_WHAT[result['kind']]}. It belongs to this target alone (hash `{target['hash']}`) and changes only "
        "the speed of its text, never the text.",
        f"```\n{_USE[result['kind']]}\n```",
        "## How well it drafts",
        f"Greedy chains on {result['held_answers']:,} held-out prompts' answers, which were not trained on. τ is "
        "tokens per target pass, the target's own included; α is how often a drafted token is right once the ones "
        "before it were.",
        acceptance_table(result["evaluations"][-1]["kinds"]),
        "## How it was made",
        _facts(result),
        "Prompts (the answers are the target's own):",
        "\n".join(f"- {d['file']}: {d['prompts']:,} prompts, sha256 `{d['sha256']}`" for d in result["data"]),
        f"```\n{recipe['command']}\n```",
        "## Licence",
        "The weights were made from the target and its own answers: the target's licence applies to them.",
    ]
    return "\n\n".join(parts) + "\n"


def acceptance_table(kinds: Json) -> str:
    """Acceptance by position and by kind of text."""
    deep = max((len(k["alpha_by_position"]) for k in kinds.values()), default=0)
    head = "| kind of text | τ | " + " | ".join(f"α {i + 1}" for i in range(deep)) + " |"
    rule = "|---|" + "---|" * (deep + 1)
    rows = [_row(name, k, deep) for name, k in kinds.items()]
    return "\n".join([head, rule, *rows])


def _row(name: str, kind: Json, deep: int) -> str:
    cells = [f"{alpha:.2f}" for alpha in kind["alpha_by_position"]]
    cells += ["–"] * (deep - len(cells))
    return f"| {name} | {kind['tau']:.2f} | " + " | ".join(cells) + " |"


def _facts(result: Json) -> str:
    recipe, vocabulary = result["recipe"], result.get("vocabulary")
    lines = [
        f"- {result['answers']:,} answers, {result['answer_tokens']:,} tokens, at most {recipe['max_tokens']} each",
        f"- {result['steps']:,} steps over {result['tokens']:,} tokens in {result['seconds']:,.0f} s "
        f"({result['tok_s']:,.0f} tokens/s) on {result['device']}",
        f"- learning rate {recipe['lr']:g}, {recipe['batch_tokens']:,} tokens a batch, seed {recipe['seed']}",
        f"- {result['parameters']:,} trained parameters",
    ]
    if vocabulary:
        lines.append(
            f"- draft vocabulary of {vocabulary['size']:,} ids: {vocabulary['coverage']:.1%} of the training answers' "
            f"tokens, {vocabulary['held_coverage']:.1%} of the held-out ones'"
        )
    if result.get("taps"):
        lines.append(f"- features after the target's layers {', '.join(map(str, result['taps']))} (counted from 0)")
    return "\n".join(lines)
