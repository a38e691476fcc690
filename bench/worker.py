"""One engine in a process of its own, for `peers.py`: reads requests on standard input, answers on standard output.

    python bench/worker.py ENGINE MODEL OPTIONS_AS_JSON
    {"ids": [...], "tokens": 64}  →  {"seconds": 1.2, "first": 0.2, "ids": [...]}

`first` is the time of the first token (null where unknown): decoding speed is (tokens - 1) / (seconds - first). Every
engine must generate exactly that many tokens, greedily, end-of-sequence ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Generate = Callable[[list[int], int], Iterator[list[int]]]  # yields new ids as they arrive


def outrider(model: str | None, options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    from outrider import LLM, SamplingParams, __version__

    llm = LLM(model, **options)
    fresh = {k: v for k, v in options.items() if k != "dtype"}

    def generate(ids: list[int], tokens: int) -> Iterator[list[int]]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        for piece in llm.using(**fresh).stream(ids, params):  # no memory of earlier prompts
            yield piece.token_ids

    return generate, {"version": __version__, "dtype": llm.dtype}


def transformers(model: str | None, options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import torch
    import transformers as hf

    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    from hf import in_transformers
    from outrider.models.checkpoint import open_checkpoint

    loaded = in_transformers(open_checkpoint(model), getattr(torch, options.pop("dtype", "float32")))

    class Stream(hf.generation.streamers.BaseStreamer):
        """Records the time of the first new token (the first call carries the prompt)."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def generate(ids: list[int], tokens: int) -> Iterator[list[int]]:
        given, stream = torch.tensor([ids]), Stream()
        exact = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        lookup = "prompt_lookup_num_tokens" in options
        out = loaded.generate(
            given, attention_mask=torch.ones_like(given), streamer=None if lookup else stream, **exact, **options
        )
        new = out[0, len(ids) :].tolist()
        generate.first = stream.times[1] if len(stream.times) > 1 else None  # type: ignore[attr-defined]
        yield new

    return generate, {"version": hf.__version__}


def llamacpp(model: str | None, options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import llama_cpp

    lookup = options.pop("prompt_lookup", 0)
    draft = None
    if lookup:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup)
    cores = os.cpu_count() or 1  # its own default is half of them
    given = {"n_ctx": 2048, "n_threads": cores, "n_threads_batch": cores, "verbose": False} | options
    engine = llama_cpp.Llama(model, draft_model=draft, logits_all=bool(lookup), **given)

    def generate(ids: list[int], tokens: int) -> Iterator[list[int]]:
        engine.reset()
        for made, token in enumerate(engine.generate(ids, temp=0.0, top_k=1), start=1):
            yield [token]
            if made == tokens:
                return

    return generate, {"version": llama_cpp.__version__}


def vllm(model: str | None, options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import vllm as engine

    loaded = engine.LLM(model=model, dtype="float32", max_model_len=2048, skip_tokenizer_init=True, **options)

    def generate(ids: list[int], tokens: int) -> Iterator[list[int]]:
        params = engine.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        (out,) = loaded.generate([engine.TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
        yield list(out.outputs[0].token_ids)

    return generate, {"version": engine.__version__}


ENGINES = {"outrider": outrider, "transformers": transformers, "llamacpp": llamacpp, "vllm": vllm}


def answer(generate: Generate, ids: list[int], tokens: int) -> dict[str, Any]:
    begin, times, new = time.perf_counter(), [], []
    for some in generate(ids, tokens):
        times.append(time.perf_counter())
        new += some
    seconds = time.perf_counter() - begin
    reported = getattr(generate, "first", None)  # an engine that cannot stream may still report it
    first = reported or (times[0] if len(times) > 1 else None)
    return {"seconds": seconds, "first": first and first - begin, "ids": new[:tokens]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", help="empty for the default model")
    parser.add_argument("options", type=json.loads, help="a JSON object")
    arguments = parser.parse_args()
    generate, facts = ENGINES[arguments.engine](arguments.model or None, arguments.options)
    print(json.dumps({"ready": True, **facts}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answer(generate, request["ids"], request["tokens"])), flush=True)


if __name__ == "__main__":
    main()
