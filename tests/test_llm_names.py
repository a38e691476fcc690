"""What people try first: names of other libraries, results in a notebook, functions on logits."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from outrider import LLM, ConfigError, SamplingParams
from outrider.models.results import Completion, Result
from outrider.types import Stats

PROMPT = "one two three one two three one"
WARM = {"temperature": 0.8, "seed": 7, "max_tokens": 16}


# ---------------------------------------------------------------- names


def test_names_of_transformers_and_vllm(llm: LLM, folder: Path) -> None:
    ours = llm.generate(PROMPT, SamplingParams(max_tokens=9, temperature=1.0, seed=5))[0]
    assert llm.generate(PROMPT, max_new_tokens=9, do_sample=True, seed=5)[0].token_ids == ours.token_ids
    greedy = llm.generate(PROMPT, SamplingParams(max_tokens=9))[0].token_ids
    assert llm.generate(PROMPT, max_tokens=9, do_sample=False, temperature=0.7)[0].token_ids == greedy
    assert [i for piece in llm.stream(PROMPT, max_new_tokens=9) for i in piece.token_ids] == greedy
    messages = [{"role": "user", "content": "the fox"}]
    assert len(llm.chat(messages, max_new_tokens=3, num_return_sequences=2)[0].outputs) == 2
    assert (
        llm.generate(PROMPT, eos_token_id=greedy[2], max_new_tokens=9)[0].token_ids
        == greedy[: greedy.index(greedy[2]) + 1]
    )
    other = LLM.from_pretrained(folder, torch_dtype=torch.float32, max_model_len=64, max_num_seqs=2, drafter="off")
    assert (other.dtype, other.config.max_length, other.config.max_batch) == ("float32", 64, 2)


def test_a_call_is_transformers_pipeline(llm: LLM) -> None:
    text = llm.generate(PROMPT, max_tokens=5)[0].text
    assert llm(PROMPT, max_new_tokens=5) == [{"generated_text": PROMPT + text}]
    assert llm([PROMPT, PROMPT], max_new_tokens=5, return_full_text=False) == [[{"generated_text": text}]] * 2
    messages = [{"role": "user", "content": "the fox"}]
    (answer,) = llm(messages, max_new_tokens=5)
    assert answer["generated_text"][:-1] == messages
    assert answer["generated_text"][-1] == {"role": "assistant", "content": llm.chat(messages, max_tokens=5)[0].text}
    assert llm([messages, messages], max_new_tokens=5) == [[answer]] * 2


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"max_new_token": 3}, "There is no argument 'max_new_token'. Call it max_tokens."),
        ({"num_beams": 4}, "There is no argument 'num_beams'. It has: temperature, "),
        ({"params": SamplingParams(), "top_k": 3}, "Give top_k in SamplingParams, or no SamplingParams."),
    ],
)
def test_other_names_are_explained(llm: LLM, names: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        llm.generate(PROMPT, **names)


def test_sampling_params_say_what_to_call() -> None:
    for name, hint in {"max_new_tokens": "Call it max_tokens.", "do_sample": "Set temperature: 0 is greedy.",
                       "temprature": "Call it temperature."}.items():  # fmt: skip
        with pytest.raises(ConfigError, match=f"SamplingParams has no field '{name}'. {hint}"):
            SamplingParams(**{name: 1})


# ---------------------------------------------------------------- functions on logits


def only_even(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[1::2] = -torch.inf
    return logits


def alternating(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Depends on everything that was generated."""
    return logits + torch.roll(logits, sum(generated) % 7)


@pytest.mark.parametrize("params", [{"max_tokens": 16}, WARM, WARM | {"top_k": 12, "repetition_penalty": 1.2}])
def test_functions_change_the_choice_and_not_the_promise(llm: LLM, params: dict[str, Any]) -> None:
    both = SamplingParams(**params, logits_processors=[alternating, only_even])
    fast, plain = (llm.generate(PROMPT, both, speculate=on)[0] for on in (True, False))
    assert fast.token_ids == plain.token_ids
    assert not any(token % 2 for token in fast.token_ids)
    assert fast.token_ids != llm.generate(PROMPT, SamplingParams(**params))[0].token_ids


def test_a_function_sees_every_choice_once_and_in_order(llm: LLM) -> None:
    def seen(on: bool) -> list[list[int]]:
        calls: list[list[int]] = []

        def watch(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
            calls.append(generated)
            return logits

        ids = llm.generate(PROMPT, SamplingParams(max_tokens=12, logits_processors=(watch,)), speculate=on)[0].token_ids
        assert calls[: len(ids)] == [ids[:i] for i in range(len(ids))]
        return calls[: len(ids)]

    assert seen(True) == seen(False)


def test_functions_with_the_rules_that_draw(llm: LLM) -> None:
    params = SamplingParams(**WARM, logits_processors=[only_even])
    for rule in ("reject", "block"):
        assert not any(i % 2 for i in llm.using(rule=rule).generate(PROMPT, params)[0].token_ids)


def test_a_function_with_a_guide(llm: LLM) -> None:
    def no_a(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[llm.tokenizer.encode("a")[0]] = -torch.inf
        return logits

    params = SamplingParams(guide={"regex": "[ab]{4}"}, logits_processors=[no_a])
    assert llm.generate(PROMPT, params)[0].text == "bbbb"


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda ids, logits: None, "must return a tensor of"),
        (lambda ids, logits: logits[:5], "must return a tensor of"),
        (lambda ids, logits: ids["x"], "failed: TypeError"),
        (lambda ids: ids, "failed: TypeError"),
    ],
)
def test_functions_that_fail(llm: LLM, function: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        llm.generate(PROMPT, SamplingParams(logits_processors=[function]))
    assert llm.generate(PROMPT, max_tokens=2)[0].text  # the engine goes on


def test_what_is_no_function() -> None:
    with pytest.raises(ConfigError, match="a logits processor is a function"):
        SamplingParams(logits_processors=["x"])


# ---------------------------------------------------------------- how results show themselves


class Tags(HTMLParser):
    """Open and close in pairs; collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag != "hr":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_result_in_a_notebook(llm: LLM) -> None:
    result = llm.generate(PROMPT, n=2, **WARM)[0]
    assert ["".join(output.texts) for output in result.outputs] == [output.text for output in result.outputs]
    page, parser = result._repr_html_(), Tags()
    parser.feed(page)
    assert not parser.open
    for output in result.outputs:
        assert output.text in parser.text
        assert f"plain, {output.stats.emitted} passes" in parser.text
        assert f"this run, {output.stats.steps} passes" in parser.text
    assert ("<script" in page, "http" in page) == (False, False)


def completion(texts: list[str], origins: str) -> Completion:
    stats = Stats(steps=2, drafted=3, reached=2, accepted=1, emitted=len(texts))
    return Completion("".join(texts), [5] * len(texts), "stop", origins, stats, 1, texts=texts)


def test_html_is_escaped_and_marks_accepted_text() -> None:
    page = completion(["<script>", "a & b", "c"], "bab")._repr_html_()
    assert "&lt;script&gt;<span" in page
    assert ">a &amp; b</span>c" in page
    assert "<script" not in page
    empty = Completion("", [], "cancelled", "", Stats(), 1)
    assert "0 tokens" in empty._repr_html_()


def test_a_result_in_a_terminal() -> None:
    one = completion(["The ", "end"], "ab")
    result = Result("p", [1], [one, one])
    assert (str(one), str(result)) == ("The end", "The end\n\nThe end")
    assert repr(one) == "Completion('The end', 2 tokens, 2 passes, τ 1.00, α 0.50, stop)"
    assert repr(result).startswith("Result(Completion('The end'")
    assert len(repr(completion(["x" * 500], "b"))) < 130
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="standard", width=80).print(result)
    assert "\x1b[32mThe \x1b[0mend" in out.getvalue()
