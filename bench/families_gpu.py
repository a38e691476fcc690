"""Every family of the built-in decoder on one GPU: is its text exact, are its logits right, what do experts cost?

    python bench/families_gpu.py                     # about two minutes
    python bench/families_gpu.py --device cpu --tiny --only llama,mixtral --rows ""      # a rehearsal

1. Each family, in a process of its own: transformers makes a random model from a configuration, the built-in decoder
   takes its weights. Logits of a text in bfloat16, ours and transformers', are compared with transformers in float32.
   Then plain decoding, one request at a time, against `suffix`, `ngram`, `layerskip` and `model` (the target without
   its last layers), at T = 0 and 0.8, alone and in batches of 6, id by id. GLM-4.5 and MiMo (Qwen2's layers) have a
   layer for further tokens (MTP) and draft with it too, as a tree and as a chain; Llama with a random DFlash head.
2. `experts`: seconds of a captured pass by rows, of random models with the layers of Mixtral 8x7B, Qwen3-30B-A3B and
   GLM-4.5-Air and of a dense one beside them; the K that such costs allow; and decoded tokens per second, plain and
   with `suffix` at a fixed and at the controller's K.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.backends import WHOLE
from outrider.backends.pass_costs import by_rows, target_costs
from outrider.backends.rows import rows_of
from outrider.backends.transformer import Transformer
from outrider.drafters.head.dflash import DFlashHead
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.llm import CapturedPasses
from outrider.models.checkpoint import Checkpoint, in_memory
from outrider.models.config import from_hf
from outrider.models.speculators import DFLASH, random_head
from outrider.models.tokenizer import Tokenizer
from outrider.models.weights import LayerSubset, cut_config, expected
from outrider.types import Sequence
from w4 import Random

VOCABULARY, LENGTH, BATCH = 2048, 256, 6
PROMPTS, TOKENS, K = 6, 48, 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1024, "max_position_embeddings": 512, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
TINY = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96}
WINDOWED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # the class in transformers, and what is not usual
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "smollm3": ("SmolLM3", {}),
    "gemma2": ("Gemma2", {"head_dim": 64, "query_pre_attn_scalar": 64} | WINDOWED),
    "gemma3": ("Gemma3Text", {"head_dim": 64, "query_pre_attn_scalar": 64} | WINDOWED),
    "phi3": ("Phi3", {"sliding_window": None}),
    "granite": ("Granite", {"attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "olmo2": ("Olmo2", {}),
    "glm4": ("Glm4", {"head_dim": 64, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "head_dim": 64,
         "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64} | WINDOWED),
    "glm4_moe": (
        "Glm4Moe",
        {"n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "head_dim": 64,
         "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
    ),
}  # fmt: skip
MTP = {  # what is around the block of a layer for further tokens
    "glm4_moe": ("layers.{}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "qwen2": ("mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
}
WIDE: dict[str, dict[str, Any]] = {  # real layers, fewer of them
    "mixtral 8x7b, 6 layers": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b, 12 layers": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "glm-4.5-air, 5 layers": {
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 5,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "attention_bias": True, "first_k_dense_replace": 1,
    },
    "dense, 14 layers": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 14,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16)


# ------------------------------------------------------------ a family


def tokenizer() -> Tokenizer:
    """A name for every id; prompts are ids."""
    from tokenizers import Tokenizer as Core, decoders, models, pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"w{i}" for i in range(VOCABULARY - len(pieces))]
    core = Core(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(core, 0, 1)


def random_module(family: str, changes: dict[str, Any], device: str) -> Any:
    """transformers' model of a family with weights large enough that its layers matter."""
    import transformers

    name, own = FAMILIES[family]
    sizes = SIZES | own | changes
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    torch.manual_seed(len(family))
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device(device):
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for weight, parameter in module.named_parameters():
        draw(weight, parameter, family)
    for buffer, values in module.named_buffers():
        if buffer.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(values, 0.0, 0.1)
    return module


def draw(name: str, tensor: Tensor, family: str) -> None:
    wide = tensor.shape[-1] ** -0.5
    if "norm" in name:
        torch.nn.init.normal_(tensor, 0.0 if family.startswith("gemma") else 1.0, 0.1)  # Gemma's are stored minus one
    elif "embed_tokens" in name:
        torch.nn.init.normal_(tensor, 0.0, 3 * wide if family.startswith("gemma") else 1.0)
    elif "lm_head" in name:
        torch.nn.init.normal_(tensor, 0.0, 3 * wide)
    elif tensor.dim() < 2:
        torch.nn.init.normal_(tensor, 0.0, 0.1)
    else:
        torch.nn.init.normal_(tensor, 0.0, (0.5 if "o_proj" in name or "down" in name else 1.2) * wide)


def add_mtp(checkpoint: Checkpoint, at: str, parts: tuple[str, ...]) -> None:
    """Give the weights a layer for further tokens, under the names of a published file.

    It is a copy of a layer in the middle that reads the token and little of the state, so that some drafts are right.
    """
    config, layers = checkpoint.config, checkpoint.config.layers
    stored: Any = getattr(checkpoint.weights, "source", checkpoint.weights)
    copied, at, h = f"layers.{layers // 2}.", at.format(layers), config.hidden_size
    for name in expected(config):
        if name.startswith(copied):
            stored.tensors[at + name.removeprefix(copied)] = checkpoint.weights.get(name, torch.float32)
    halves = [torch.eye(h), 0.2 * h**-0.5 * torch.randn(h, h, generator=torch.Generator().manual_seed(3))]
    joined = torch.cat(halves if parts[2] == "eh_proj" else halves[::-1], 1)
    for part in parts:
        stored.tensors[f"{at}{part}.weight"] = joined if part.endswith("proj") else torch.ones(h)


def run_family(family: str, device: str, changes: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    os.environ["OUTRIDER_HOME"] = tempfile.mkdtemp(prefix="outrider-families-")
    module = random_module(family, changes, device)
    checkpoint, _ = in_memory(module, tokenizer())
    if family in MTP:
        add_mtp(checkpoint, *MTP[family])
    dtype = "float32" if device == "cpu" else "bfloat16"
    plain = LLM(checkpoint, drafter="off", k=0, device=device, dtype=dtype, max_batch=1, max_length=LENGTH)
    found = {"native": not plain.backend, "logits": logits_against(module, plain)}
    loaded_s = time.perf_counter() - begin
    del module
    return found | verify(plain, drafters_of(plain, checkpoint)) | {
        "load_s": round(loaded_s, 1), "s": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def drafters_of(plain: LLM, checkpoint: Checkpoint) -> dict[str, LLM]:
    """An engine for each drafter, for up to six sequences."""
    layers, target = checkpoint.config.layers, plain.target
    kept = list(range(layers - max(layers // 4, 1)))
    small = Transformer(
        cut_config(checkpoint.config, kept),
        LayerSubset(checkpoint.weights, kept),
        target.compute,
        target.device,
        LENGTH,
    )
    options: dict[str, dict[str, Any]] = {"suffix": {"suffix_shared_tokens": 0}, "ngram": {}}
    options |= {"layerskip": {"skip_mlp": [layers // 2], "skip_layers": [layers - 2]}, "model": {"draft_model": small}}
    if target.mtp is not None:
        options |= {"head": {"head": "mtp"}, "head, chains": {"head": "mtp", "tree": False}}
    if checkpoint.config.architecture == "llama":
        blocks = block_head(target)
        options |= {"head, blocks": {"head": blocks}, "head, block trees": {"head": blocks, "tree": True}}
    return {
        name: plain.using(drafter=name.partition(",")[0], k=K, max_batch=BATCH, **own) for name, own in options.items()
    }


def block_head(target: Any) -> DFlashHead:
    """An untrained drafter of the DFlash kind: its drafts are wrong, and the text must not show it."""
    config, tensors = random_head(target.config, DFLASH, layers=3)
    config = replace(config, block=15, mask_token=7)
    return DFlashHead(config, tensors, target.embedding, target.compute, target.device, LENGTH, None)


def prompts() -> list[list[int]]:
    """A pattern that comes back, so that lookups find something."""
    dice = torch.Generator().manual_seed(5)
    patterns = torch.randint(2, VOCABULARY, (PROMPTS, 9), generator=dice).tolist()
    return [pattern * (2 + i % 3) for i, pattern in enumerate(patterns)]


def verify(plain: LLM, llms: dict[str, LLM]) -> dict[str, Any]:
    """Plain decoding, one request at a time, against every drafter, alone and in batches."""
    cells: dict[str, dict[str, Any]] = {name: {"compared": 0, "wrong": 0, "accepted": 0, "reached": 0} for name in llms}
    for temperature in (0.0, 0.8):
        params = [
            SamplingParams(temperature=temperature, seed=70 + i, max_tokens=TOKENS - 4 * (i % 3), ignore_eos=True)
            for i in range(PROMPTS)
        ]
        sent = list(zip(prompts(), params, strict=True))
        expected = [ids for one in sent for ids in answers(plain, [one], {})]
        for name, llm in llms.items():
            for batches in ([[one] for one in sent], [sent]):
                got = [ids for batch in batches for ids in answers(llm, batch, cells[name])]
                cells[name]["compared"] += sum(map(len, got))
                cells[name]["wrong"] += sum(one != other for one, other in zip(expected, got, strict=True))
    for name, llm in llms.items():
        cells[name]["failures"] = [str(failure)[:200] for failure in llm.engine.failures][:2]
    counts = {key: sum(cell[key] for cell in cells.values()) for key in ("compared", "wrong")}
    return counts | {"drafters": cells}


def answers(llm: LLM, sent: list[tuple[list[int], SamplingParams]], into: dict[str, Any]) -> list[list[int]]:
    results = llm.generate([ids for ids, _ in sent], [params for _, params in sent])
    for result in results:
        for name in ("accepted", "reached"):
            into[name] = into.get(name, 0) + getattr(result.stats, name)
    return [result.token_ids for result in results]


def logits_against(module: Any, llm: LLM) -> dict[str, float]:
    """The median row's relative distance from transformers in float32, of our logits and of transformers' own."""
    text = [token for prompt in prompts() for token in prompt][:96]
    with torch.inference_mode():
        ids = torch.tensor([text], device=module.device)
        theirs = module(ids).logits[0].float()
        exact = module.float()(ids).logits[0]
    ours = our_logits(llm, text).to(exact.device)

    def error(logits: Tensor) -> float:
        return round(float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).median()), 6)

    same = float((ours.argmax(-1) == exact.argmax(-1)).float().mean())
    return {"ours": error(ours), "transformers": error(theirs), "same_choice": round(same, 3)}


def our_logits(llm: LLM, text: list[int]) -> Tensor:
    model: Any = llm.target
    cache = Cache(LENGTH, 2, LENGTH, model.device)
    plane, seq, batch = cache.add_plane(*model.plane_shape), Sequence(1, text), BatchBuilder(cache)
    cache.open(seq)
    cache.reserve(seq, len(text), 0)
    batch.pending(seq, 0, len(text), want=False)
    batch.want = list(range(len(text)))
    passes = CapturedPasses(cache, 1, model.device)(model, plane)
    logits = model.forward(rows_of(batch), plane).logits if passes is None else passes.logits(batch, WHOLE)
    return logits.float().clone()


def families(options: argparse.Namespace) -> dict[str, Any]:
    """All of them at once: most of their time is compiling. So is that of the next section: its kernels too."""
    changes, found, on_gpu = TINY if options.tiny else {}, {}, options.device == "cuda"
    workers = (os.cpu_count() or 1) if on_gpu else 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run_family, name, options.device, changes): name for name in options.only}
        compiling = [pool.submit(compiled, name, options) for name in options.rows if on_gpu]
        for done in as_completed(running):
            name = running[done]
            found[name] = attempt(name, done.result)
            shown = {key: found[name].get(key) for key in ("compared", "wrong", "logits", "s")}
            print(f"{name:10} {shown}", flush=True)
        for each in compiling:
            attempt("compiled", each.result)
    return found


# ------------------------------------------------------------ experts


def compiled(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fill the compiler's cache with the kernels of a model: two layers are enough."""
    os.environ["OUTRIDER_HOME"] = tempfile.mkdtemp(prefix="outrider-families-")
    return {"s": experts_of(name, WIDE[name] | {"num_hidden_layers": 2}, options)["s"]}


def experts(options: argparse.Namespace, begin: float) -> dict[str, Any]:
    """One model after the other, as long as there is time."""
    found: dict[str, Any] = {}
    for name in options.rows:
        if time.perf_counter() - begin < options.seconds - 8:
            found[name] = attempt(name, lambda name=name: experts_of(name, WIDE[name], options))  # type: ignore[misc]
            print(f"{name}: {found[name]}", flush=True)
    return found


def experts_of(name: str, data: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    small = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512} if options.tiny else {}
    config = from_hf({"vocab_size": VOCABULARY, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5} | data | small)
    checkpoint = Checkpoint(name, Path(), config, Random(config, options.device), tokenizer())
    llm = LLM(checkpoint, drafter="off", k=0, device=options.device, dtype="bfloat16", max_batch=1, max_length=512)
    seconds = by_rows(target_costs(llm.engine.target, llm.engine.cache))
    each = {rows: seconds[rows] for rows in ROWS}
    found: dict[str, Any] = {
        "ms": {rows: round(1e3 * s, 4) for rows, s in each.items()},
        "ratio": {rows: round(s / each[1], 3) for rows, s in each.items()},
        "experts_read": {rows: round(distinct(config.experts, config.experts_used, rows), 1) for rows in ROWS},
        "best_k": {str(a): best_k(seconds, a) for a in (0.6, 0.8, 0.9)},
        "speeds": speeds(llm),
        "s": round(time.perf_counter() - begin, 1),
    }
    del llm
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return found


def distinct(count: int, used: int, rows: int) -> float:
    """Experts that so many rows read, if each chose at random."""
    return count * (1 - (1 - used / count) ** rows) if count else 0.0


def best_k(seconds: dict[int, float], alpha: float) -> int:
    """The K at which drafting that costs nothing would emit most tokens a second, at this acceptance."""

    def rate(k: int) -> float:
        return (1 - alpha ** (k + 1)) / (1 - alpha) / seconds[k + 1]

    return max((rows - 1 for rows in seconds), key=rate)


def speeds(llm: LLM) -> dict[str, Any]:
    """Tokens a second of an answer to a prompt that repeats itself."""
    found: dict[str, Any] = {}
    params = SamplingParams(max_tokens=160, ignore_eos=True)
    options: dict[str, dict[str, Any]] = {"plain": {"drafter": "off", "k": 0}}
    options |= {f"suffix, K {k}": {"drafter": "suffix", "k": k, "suffix_shared_tokens": 0} for k in (8, "auto")}
    for name, how in options.items():
        runner = llm.using(**how)
        runner.generate([prompts()[0]], replace(params, max_tokens=32))
        begin = time.perf_counter()
        (result,) = runner.generate([prompts()[0]], params)
        took = time.perf_counter() - begin
        found[name] = {"tok_s": round(len(result.token_ids) / took, 1), "tau": round(result.stats.tau, 3)}
        found[name]["drafted_per_step"] = round(result.stats.drafted / max(result.stats.steps, 1), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smaller models, for a rehearsal on a CPU")
    parser.add_argument("--only", default=",".join(FAMILIES), help="families")
    parser.add_argument("--rows", default=";".join(WIDE), help="models of the section `experts`, between semicolons")
    parser.add_argument("--seconds", type=float, default=115.0, help="after which no further section begins")
    options = parser.parse_args()
    options.only, options.rows = (
        [n for n in given if n] for given in (options.only.split(","), options.rows.split(";"))
    )
    os.environ["OUTRIDER_HOME"] = tempfile.mkdtemp(prefix="outrider-families-")
    begin = time.perf_counter()
    facts: dict[str, Any] = {"bench": "families_gpu", "command": " ".join(["python", *sys.argv])}
    on_gpu = options.device == "cuda"
    facts |= {"device": torch.cuda.get_device_name(0) if on_gpu else "cpu", "torch": torch.__version__}
    facts["families"] = families(options)
    print(f"---- experts ({time.perf_counter() - begin:.0f} s)", flush=True)
    facts["experts"] = experts(options, begin)
    whole = [one for one in facts["families"].values() if isinstance(one, dict) and "compared" in one]
    facts |= {key: sum(one[key] for one in whole) for key in ("compared", "wrong")}
    print(json.dumps(facts | {"s": round(time.perf_counter() - begin, 1)}))


def attempt(name: str, section: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return section()
    except Exception as error:
        print(f"---- {name} failed", flush=True)
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:400]}


if __name__ == "__main__":
    main()
