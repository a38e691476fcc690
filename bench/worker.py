"""One engine in a process of its own, for `peers.py` and `perplexity.py`: a JSON request a line, an answer a line.

    python bench/worker.py ENGINE MODEL OPTIONS_AS_JSON
    {"ids": [...], "tokens": 64}  →  {"seconds": 1.2, "first": 0.2, "ids": [...]}    generation, greedy
    {"ids": [...], "rows": 8}     →  {"seconds": 0.04}           one pass over the last 8 ids, with all their logits
    {"ids": [...]}                →  {"loss": 1234.5}            negative log-probability of ids[1:], in nats
    {}                            →  {"bytes_per_second": 3e10}  engine `memory` only: the speed of reading memory

`first` is the time of the first token (null where unknown): decoding speed is (tokens - 1) / (seconds - first). Every
engine must generate exactly that many tokens, end-of-sequence ignored. A method that an engine lacks ends the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CORES = os.cpu_count() or 1
WINDOW = 2048  # tokens of the longest request


class Engine:
    """What a contender can do; `facts` go into the result."""

    facts: dict[str, Any]
    first: float | None = None  # when the first token came, from an engine that cannot stream

    def prepare(self) -> None:
        """Before the time of a request begins."""

    def generate(self, ids: list[int], tokens: int) -> Iterator[list[int]]:
        """New ids as they arrive."""
        raise NotImplementedError

    def pass_seconds(self, ids: list[int], rows: int) -> float:
        """One pass over the last `rows` ids, after all before them; every row's logits are computed."""
        raise NotImplementedError

    def loss(self, ids: list[int]) -> float:
        """Of ids[1:] after an empty context."""
        raise NotImplementedError


class Outrider(Engine):
    def __init__(self, model: str | None, options: dict[str, Any]) -> None:
        from outrider import LLM, __version__

        self.llm = LLM(model, max_length=WINDOW, **options)
        self.options = {name: value for name, value in options.items() if name != "dtype"}
        self.facts = {"version": __version__, "dtype": self.llm.dtype}
        self._context: tuple[Any, ...] = ()

    def prepare(self) -> None:
        self.fresh = None  # else two engines would be in memory
        self.fresh = self.llm.using(**self.options)  # no memory of earlier prompts

    def generate(self, ids: list[int], tokens: int) -> Iterator[list[int]]:
        from outrider import SamplingParams

        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        for piece in self.fresh.stream(ids, params):
            yield piece.token_ids

    def pass_seconds(self, ids: list[int], rows: int) -> float:
        if not self._context or self._context[0] != ids:
            self._context = ids, *self._filled(ids)
        begin = time.perf_counter()
        self._logits(*self._context[1:], len(ids) - rows)
        return time.perf_counter() - begin

    def loss(self, ids: list[int]) -> float:
        import torch

        logp = torch.log_softmax(self._logits(*self._room(ids), 0).float(), -1)  # [T, V]
        return -float(logp[:-1].gather(1, torch.tensor(ids[1:])[:, None]).double().sum())

    def _room(self, ids: list[int]) -> tuple[Any, Any, Any]:
        """A cache of its own with one sequence, its plane, the sequence."""
        from outrider.engine.cache import Cache
        from outrider.types import Sequence

        cache, seq = Cache(WINDOW, 2, WINDOW), Sequence(1, ids)
        plane = cache.add_plane(*self.llm.target.plane_shape)
        cache.open(seq)
        cache.reserve(seq, len(ids), 0)
        return cache, plane, seq

    def _filled(self, ids: list[int]) -> tuple[Any, Any, Any]:
        room = self._room(ids)
        self._logits(*room, 0)
        return room

    def _logits(self, cache: Any, plane: Any, seq: Any, start: int) -> Any:
        from outrider.backends.rows import rows_of
        from outrider.engine.batch import BatchBuilder

        batch = BatchBuilder(cache)
        batch.pending(seq, start, len(seq.tokens), want=False)
        batch.want = list(range(len(seq.tokens) - start))
        return self.llm.target.forward(rows_of(batch), plane).logits


class LlamaCpp(Engine):
    def __init__(self, model: str | None, options: dict[str, Any]) -> None:
        import llama_cpp

        lookup, draft = options.pop("prompt_lookup", 0), None
        if lookup:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup)
        given = {
            "n_ctx": WINDOW,
            "n_threads": CORES,
            "n_threads_batch": CORES,
            "verbose": False,
        }  # default: half of them
        self.llama = llama_cpp.Llama(model, draft_model=draft, **{"logits_all": bool(lookup)} | given | options)
        system = llama_cpp.llama_print_system_info().decode()
        self.facts = {"version": llama_cpp.__version__, "threads": given["n_threads"], "build": system.strip()}

    def generate(self, ids: list[int], tokens: int) -> Iterator[list[int]]:
        self.llama.reset()
        for made, token in enumerate(self.llama.generate(ids, temp=0.0, top_k=1), start=1):
            yield [token]
            if made == tokens:
                return

    def pass_seconds(self, ids: list[int], rows: int) -> float:
        start = len(ids) - rows
        if self.llama.input_ids[:start].tolist() != ids[:start] or self.llama.n_tokens < start:
            self.llama.reset()
            self.llama.eval(ids[:start])
        self.llama.n_tokens = start  # `eval` forgets what came after it
        begin = time.perf_counter()
        self.llama.eval(ids[start:])
        return time.perf_counter() - begin

    def loss(self, ids: list[int]) -> float:
        import numpy as np

        self.llama.reset()
        self.llama.eval(ids)
        rows = self.llama.scores[: len(ids) - 1].astype(np.float64)
        top = rows.max(1)
        total = top + np.log(np.exp(rows - top[:, None]).sum(1))
        return float((total - rows[np.arange(len(rows)), ids[1:]]).sum())


class Transformers(Engine):
    def __init__(self, model: str | None, options: dict[str, Any]) -> None:
        import torch
        import transformers as hf

        from hf import in_transformers
        from outrider.models.checkpoint import open_checkpoint

        self.torch, self.hf, self.options = torch, hf, options
        self.model = in_transformers(open_checkpoint(model), getattr(torch, options.pop("dtype", "float32")))
        self.facts = {"version": hf.__version__}

    def generate(self, ids: list[int], tokens: int) -> Iterator[list[int]]:
        times: list[float] = []

        class Stream(self.hf.generation.streamers.BaseStreamer):  # type: ignore[misc, name-defined]
            """Records when tokens come (the first call carries the prompt)."""

            def put(self, value: Any) -> None:
                times.append(time.perf_counter())

            def end(self) -> None:
                pass

        given = self.torch.tensor([ids])
        exact = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        stream = None if "prompt_lookup_num_tokens" in self.options else Stream()
        mask = self.torch.ones_like(given)
        out = self.model.generate(given, attention_mask=mask, streamer=stream, **exact, **self.options)
        self.first = times[1] if len(times) > 1 else None
        yield out[0, len(ids) :].tolist()

    def pass_seconds(self, ids: list[int], rows: int) -> float:
        with self.torch.inference_mode():
            given = self.torch.tensor([ids])
            past = self.model(given[:, :-rows], use_cache=True, logits_to_keep=1).past_key_values
            begin = time.perf_counter()
            self.model(given[:, -rows:], past_key_values=past, use_cache=True)
            return time.perf_counter() - begin

    def loss(self, ids: list[int]) -> float:
        with self.torch.inference_mode():
            logp = self.torch.log_softmax(self.model(self.torch.tensor([ids])).logits[0].float(), -1)
            return -float(logp[:-1].gather(1, self.torch.tensor(ids[1:])[:, None]).double().sum())


class Vllm(Engine):
    def __init__(self, model: str | None, options: dict[str, Any]) -> None:
        import vllm

        self.vllm, self.facts = vllm, {"version": vllm.__version__}
        self.llm = vllm.LLM(model=model, dtype="float32", max_model_len=WINDOW, skip_tokenizer_init=True, **options)

    def generate(self, ids: list[int], tokens: int) -> Iterator[list[int]]:
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        (out,) = self.llm.generate([self.vllm.TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
        yield list(out.outputs[0].token_ids)


class Memory(Engine):
    """Not an engine: how fast all cores together read memory that no cache holds."""

    def __init__(self, model: str | None, options: dict[str, Any]) -> None:
        import torch

        from outrider.backends.cpu.memory import arena  # huge pages, as weights have them

        self.torch, self.facts = torch, {"threads": torch.get_num_threads()}
        self.data = arena(1 << 30).zero_()

    def speed(self) -> float:
        """The faster of two sums, each of which reads every byte once, in order."""
        return max(self._sum(dtype) for dtype in (self.torch.float32, self.torch.int64))

    def _sum(self, dtype: Any) -> float:
        begin = time.perf_counter()
        self.data.view(dtype).sum()
        return self.data.numel() / (time.perf_counter() - begin)


ENGINES = {"outrider": Outrider, "transformers": Transformers, "llamacpp": LlamaCpp, "vllm": Vllm, "memory": Memory}


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    if not request:
        return {"bytes_per_second": engine.speed()}
    ids = request["ids"]
    if "rows" in request:
        return {"seconds": engine.pass_seconds(ids, request["rows"])}
    return generated(engine, ids, request["tokens"]) if "tokens" in request else {"loss": engine.loss(ids)}


def generated(engine: Engine, ids: list[int], tokens: int) -> dict[str, Any]:
    engine.prepare()
    begin, times, new = time.perf_counter(), [], []
    for some in engine.generate(ids, tokens):
        times.append(time.perf_counter())
        new += some
    seconds = time.perf_counter() - begin
    first = engine.first or (times[0] if len(times) > 1 else None)
    return {"seconds": seconds, "first": first and first - begin, "ids": new[:tokens]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", help="empty for the default model")
    parser.add_argument("options", type=json.loads, help="a JSON object")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    engine = ENGINES[arguments.engine](arguments.model or None, arguments.options)
    print(json.dumps({"ready": True, **engine.facts}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
