"""`outrider verify`: compare speculative with plain text, in this process or on a server."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from .common import encode_prompt, print_json, progress_bar, read_prompts
from .options import ApiKey, Json, MaxTokens, Prompts, TargetOptions, parse_k

_SHOWN = 5  # divergences and failures printed in full


def verify(
    options: TargetOptions,
    drafter: Annotated[list[str] | None, Option("--drafter", "-d", help="Only this drafter. Repeatable.")] = None,
    k: Annotated[str, Option("--k", help="Drafted tokens per step, or auto.")] = "5",
    limit: Annotated[int, Option(min=1, help="Use only the first N prompts.")] = 20,
    max_tokens: MaxTokens = 64,
    temperature: Annotated[
        list[float] | None,
        Option("--temperature", "-t", help="The sampling temperature. Repeatable. Default: 0 and 0.8."),
    ] = None,
    prompts: Prompts = None,
    server: Annotated[str | None, Option(help="Audit an OpenAI-compatible server, whatever engine it runs.")] = None,
    plain_server: Annotated[str | None, Option(help="The same model without speculation, to compare with.")] = None,
    api_key: ApiKey = None,
    concurrency: Annotated[int, Option(min=1, help="Requests at once to --server.")] = 1,
    as_json: Json = False,
) -> None:
    """Check that speculative text equals plain text, token by token. Every difference is reported."""
    texts = [prompt.text for prompt in read_prompts(prompts)[:limit]]
    if server is not None:
        from ..measure.audit import AuditPlan

        plan = AuditPlan(texts, tuple(temperature or ()), max_tokens, concurrency=concurrency)
        _audit(server, plain_server, api_key, options.model, plan, as_json)
        return
    from ..measure.verify import measure
    from . import show

    llm = options.load(drafter="off", k=parse_k(k))
    ids = [encode_prompt(llm, text) for text in texts]
    with progress_bar() as progress:
        report = measure(llm, ids, drafter, tuple(temperature or (0.0, 0.8)), max_tokens, progress)
    if as_json:
        print_json(report.as_json())
    else:
        show.verification(Console(), report)
    if report.failures or (report.divergences and llm.config.rule == "match"):
        raise typer.Exit(1)


def _audit(url: str, plain_url: str | None, key: str | None, model: str | None, plan: Any, as_json: bool) -> None:
    """Exit code 1 for divergences or failures, 3 if the comparison proves nothing."""
    from ..measure.audit import probe, run
    from ..measure.client import Server

    server, plain = Server(url, key), None if plain_url is None else Server(plain_url, key)
    way = probe(server, plain, model)
    if not plan.temperatures:
        # Other engines can be lossless in distribution and still give another text for the same seed.
        plan = replace(plan, temperatures=(0.0, 0.8) if way.is_outrider else (0.0,))
    with progress_bar() as progress:
        audit = run(server, plain, way, plan, progress)
    if as_json:
        print_json(audit.as_json())
    else:
        _show_audit(Console(), audit, plan)
    if audit.divergences or audit.failures:
        raise typer.Exit(1)
    if not audit.proves:
        raise typer.Exit(3)


_REFERENCES = {
    "request switch": "Plain text: the same server, with speculation switched off in the request.",
    "second server": "Plain text: the server at {plain}.",
    "the same server twice": "This server cannot switch speculation off in a request, so every request was sent twice. "
    "That shows only whether the server repeats itself; give --plain-server for a comparison with plain text.",
}


def _show_audit(console: Console, audit: Any, plan: Any) -> None:
    def line(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    line(_REFERENCES[audit.reference].format(plain=escape(audit.plain_server)))
    for d in audit.divergences[:_SHOWN]:
        line(f"\n[red]prompt {d.prompt + 1}[/red], temperature {d.temperature:g}, {d.unit} {d.position}:")
        line(f"  both        …{escape(repr(d.before))}\n  plain       {escape(repr(d.plain))}")
        line(f"  speculative {escape(repr(d.speculative))}")
    if len(audit.divergences) > _SHOWN:
        line(f"… and {len(audit.divergences) - _SHOWN} more; --json lists all of them.")
    for sentence in audit.failures[:_SHOWN]:
        line(f"[red]{escape(sentence)}[/red]")
    drafts = f"{audit.accepted} of {audit.drafted} drafted tokens accepted" if audit.drafted else "no drafts reported"
    line(f"\n{audit.compared} answers, {audit.compared_tokens} tokens, {len(audit.divergences)} divergences; {drafts}.")
    if audit.divergences and any(plan.temperatures) and audit.reference != "request switch":
        line("Above temperature 0 an engine can keep the target's distribution and still give another text per seed.")
