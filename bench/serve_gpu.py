"""Many streams over HTTP from one GPU: tokens per second, time to first token, time between chunks.

    python bench/serve_gpu.py --model 7b --small SmolLM2.gguf --drafter off --streams 1,16,64 --tokens 128

The server is Outrider's own (HTTP and text in one process, the engine in another); the clients are Outrider's load
generator in several processes, because one Python process cannot read twenty thousand chunks a second. `--model` is
smollm2 or 7b (SmolLM2 widened without changing its function, `twin.py`), or anything that `outrider serve` opens. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from outrider import LLM
from outrider.measure.client import RemoteError, Server
from outrider.measure.environment import environment
from outrider.measure.load_generator import LoadPlan, Sample, run, summary
from outrider.models.prompts import bundled, from_file

PORT = 8917
CLIENTS = 8  # processes of the load generator, at most


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="7b")
    add("--small", help="SmolLM2: a .gguf file or a folder")
    add("--drafter", default="off")
    add("--device", default="cuda")
    add("--dtype", default="bfloat16")
    add("--length", type=int, default=1024)
    add("--streams", default="1,16,64")
    add("--waves", type=int, default=3, help="requests for each stream")
    add("--tokens", type=int, default=128)
    add("--prompts", type=Path)
    add("--out", type=Path)
    add("--serve", action="store_true", help="be the server (the script starts itself with this)")
    return parser.parse_args()


def build(options: argparse.Namespace) -> LLM:
    most = max(int(n) for n in options.streams.split(","))
    settings = {"drafter": options.drafter, "dtype": options.dtype, "max_batch": most, "max_length": options.length}
    settings |= {"cache_tokens": most * options.length, "device": options.device}
    if options.model != "7b":
        return LLM(options.small if options.model == "smollm2" else options.model, **settings)
    import twin
    from outrider.models.checkpoint import open_checkpoint

    return LLM(twin.seven(open_checkpoint(options.small), device=options.device), **settings)


def serve(options: argparse.Namespace) -> None:
    from outrider.server.app import host_options, make_app, serve as listen
    from outrider.server.links import EngineProcess
    from outrider.server.settings import Settings

    settings = Settings(port=PORT, name="model")
    with EngineProcess(partial(build, options), host_options(settings)) as process:
        listen(make_app(process, settings))


def client(plan: LoadPlan) -> list[Sample]:
    return run(Server(f"http://127.0.0.1:{PORT}"), plan)


def measure(streams: int, options: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    """All streams at once, `waves` requests on each."""
    count = min(CLIENTS, streams)
    each = streams // count
    extra = {"ignore_eos": True}
    plans = [
        LoadPlan(texts[i::count] or texts, each * options.waves, each, tokens=options.tokens, seed=i, extra=extra)
        for i in range(count)
    ]
    with multiprocessing.get_context("fork").Pool(count) as pool:
        return summary([sample for samples in pool.map(client, plans, chunksize=1) for sample in samples])


def main() -> None:
    options = arguments()
    if options.serve:
        serve(options)
        return
    texts = [p.text for p in (from_file(options.prompts) if options.prompts else bundled()) if len(p.text) < 1200]
    server = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--serve"], stderr=subprocess.DEVNULL)
    try:
        wait_for(server)
        rows = {}
        for streams in (int(n) for n in options.streams.split(",")):
            measure(streams, options, texts)  # records the graphs
            before = seen_by_server()
            rows[streams] = row = measure(streams, options, texts)
            row["server"] = means(before, seen_by_server())
            gaps, first = row["between_chunks_ms"], row["ttft_ms"]["p50"]
            print(f"{streams} streams: {row['tokens_per_second']:,.0f} tok/s, first token {first:.0f} ms,", end=" ")
            print(f"between chunks p50 {gaps['p50']:.1f} p99 {gaps['p99']:.1f} ms, {row['failed']} failed;", end=" ")
            print("server: " + ", ".join(f"{phase} {ms:.1f}" for phase, ms in row["server"].items()), flush=True)
    finally:
        server.terminate()
        server.wait(60)
    facts = {"bench": "serve_gpu", "model": options.model, "drafter": options.drafter, "tokens": options.tokens}
    line = json.dumps(facts | {"rows": rows, "environment": environment(), "command": " ".join(sys.argv)})
    if options.out:
        options.out.write_text(line)
    print(line)


PHASES = {"queue_ms": "request_queue_time_seconds", "first_token_ms": "time_to_first_token_seconds"}


def seen_by_server() -> dict[str, tuple[float, float]]:
    """Sum and count, since the start, of what the server measures itself from a request's arrival on."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics") as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
    values = {name.partition("{")[0].partition(":")[2]: float(value) for name, _, value in lines if "{" in name}
    return {phase: (values[f"{name}_sum"], values[f"{name}_count"]) for phase, name in PHASES.items()}


def means(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]) -> dict[str, float]:
    pairs = {phase: [b - a for a, b in zip(before[phase], after[phase], strict=True)] for phase in PHASES}
    return {phase: 1e3 * seconds / count for phase, (seconds, count) in pairs.items() if count}


def wait_for(process: subprocess.Popen[bytes]) -> None:
    server = Server(f"http://127.0.0.1:{PORT}")
    while process.poll() is None:
        try:
            if server.models():
                return
        except RemoteError:
            time.sleep(0.5)
    raise SystemExit("The server did not start; run this with --serve to see why.")


if __name__ == "__main__":
    main()
