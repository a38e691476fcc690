"""transformers against Outrider in one process: the same weights, prompts, clock and counter."""

from __future__ import annotations

import time
from typing import Any

import torch

from gpu_common import Lab, read_bytes, sweep_up
from gpu_race import Contender, Marks, Run, Speed, contender, figures, race
from outrider.models.checkpoint import Checkpoint, open_checkpoint

ASSISTED, LOOKUP = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}, 5


def hf_model(checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> Any:
    """The checkpoint as a transformers model; weights are made on the device, so that none is held twice."""
    import transformers

    from hf import KINDS

    c = checkpoint.config
    if c.rope_scaling is not None or c.window_layers:
        raise ValueError(f"{checkpoint.name} has scaled RoPE or window layers, which this comparison does not support.")
    config = getattr(transformers, f"{KINDS[c.architecture]}Config")(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.layers, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, head_dim=c.head_dim, intermediate_size=c.intermediate_size,
        rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=c.context_length, tie_word_embeddings=c.tied, attention_bias=c.o_bias,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype=dtype,
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{KINDS[c.architecture]}ForCausalLM")(config)
    state = {}
    for name in sorted(checkpoint.weights.names()):
        if "rope" not in name:
            key = name if name.startswith("lm_head") else f"model.{name}"
            state[key] = checkpoint.weights.get(name, dtype).to(device)
    if c.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not missing, missing
    assert not unexpected, unexpected
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # RoPE frequencies are no weights
    return model.eval().requires_grad_(False)


class Marking:
    """A stopping criterion that never stops: transformers calls it after each step of every method."""

    def __init__(self, prompt: int, device: str) -> None:
        self.length, self.device = prompt, device
        self.marks: Marks = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self.device != "cpu":
            torch.cuda.synchronize()
        new, self.length = input_ids.shape[1] - self.length, input_ids.shape[1]
        self.marks.append((time.perf_counter(), {0: new}))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def their_contender(name: str, model: Any, device: str, **options: Any) -> Contender:
    from transformers import StoppingCriteriaList

    def ask(ids: list[int], tokens: int) -> Run:
        given = torch.tensor([ids], device=device)
        marking = Marking(len(ids), device)
        begin = time.perf_counter()
        out = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False, use_cache=True,
            stopping_criteria=StoppingCriteriaList([marking]), **options,
        )  # fmt: skip
        new = out[0, len(ids) :].tolist()[:tokens]
        assert len(new) == tokens, f"{name} made {len(new)} tokens instead of {tokens}"
        return Run([new], Speed.of(begin, marking.marks))

    return Contender(name, ask)


def assistant(lab: Lab, dtype: torch.dtype) -> Any:
    """The draft model in transformers, or None."""
    given = lab.options.draft_model or (lab.small.path if lab.small is not None and lab.draft is not None else None)
    return None if given is None else hf_model(open_checkpoint(str(given)), lab.device, dtype)


def room(lab: Lab, dtype: torch.dtype) -> None:
    """Raise before the memory is full."""
    needed = read_bytes(lab.checkpoint.config, dtype) * 1.1 + 4e9
    if lab.device != "cpu" and torch.cuda.mem_get_info()[0] < needed:
        free = torch.cuda.mem_get_info()[0] / 1e9
        raise MemoryError(f"a second copy of the weights needs {needed / 1e9:.0f} GB, but only {free:.0f} GB are free")


def hf_section(lab: Lab) -> dict[str, Any]:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    dtype = lab.llm.target.compute
    sweep_up()
    room(lab, dtype)
    model = hf_model(lab.checkpoint, lab.device, dtype)
    outriders = [contender(lab, "outrider plain", "off", 0, ignore_eos=True)]
    contenders = [their_contender("transformers", model, lab.device)]
    helper = assistant(lab, dtype)
    if helper is not None:
        helper.generation_config.update(**ASSISTED)
        contenders.append(their_contender("transformers assisted", model, lab.device, assistant_model=helper))
        outriders.append(contender(lab, f"outrider model K={lab.options.hf_k}", "model", lab.options.hf_k, True))
    contenders.append(their_contender("transformers lookup", model, lab.device, prompt_lookup_num_tokens=LOOKUP))
    outriders.append(contender(lab, "outrider auto", "auto", ignore_eos=True))
    prompts = lab.sample()[: lab.options.hf_prompts]
    race(lab, [*outriders, *contenders], prompts, lab.options.hf_tokens, lab.options.hf_rounds)
    found: dict[str, Any] = {"tokens": lab.options.hf_tokens, "version": transformers.__version__, "contenders": {}}
    for c in [*outriders, *contenders]:
        base = outriders[0] if c in outriders else contenders[0]
        found["contenders"][c.name] = figures(c, base) | {
            "texts_as_ours": len(c.indices) - len(c.differs(outriders[0]))
        }
    texts = len(outriders[0].indices)
    lab.table(
        f"Beside transformers {transformers.__version__}, {lab.options.hf_tokens} tokens, {texts} prompts",
        ("contender", "tok/s", "requests", "× its own plain", "τ", "texts as our plain"),
        [
            (name, r["tok_s"], r["request_tok_s"], r.get("ratio"), r["tau"], f"{r['texts_as_ours']} of {texts}")
            for name, r in found["contenders"].items()
        ],
    )
    return found
