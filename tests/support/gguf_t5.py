"""T5 and Flan-T5 in GGUF files, as llama.cpp's converter writes them, with the names of the gguf package's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from support.gguf_files import finish

ENGLISH = {"▁": -4.0, "▁the": -1.5, "▁t": -3.0, "he": -3.2, "▁cat": -2.5, "▁c": -4.0, "at": -3.5, "s": -3.0}
ENGLISH |= {c: -6.0 - i / 8 for i, c in enumerate("theca.")}
SPECIAL = {"</s>": 3, "<unk>": 2, "<pad>": 3, "<extra_id_0>": 4}  # with their kinds


def vocabulary(size: int) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and kinds: special ones, pieces, and such that fill the model's matrix."""
    tokens = [*SPECIAL, *ENGLISH]
    kinds = [*SPECIAL.values(), *([1] * len(ENGLISH)), *([5] * (size - len(tokens)))]
    scores = [0.0] * len(SPECIAL) + list(ENGLISH.values()) + [-10000.0] * (size - len(tokens))
    return tokens + [f"[PAD{i}]" for i in range(len(tokens), size)], scores, kinds


def write_t5(path: Path, theirs: Any, kind: Kind = Kind.F32, leave_out: str = "", **keys: Any) -> Path:
    """A model of transformers, matrices in this type. keys: of the file, `__` for a dot; None leaves one out."""
    c, state = theirs.config, theirs.state_dict()
    writer = gguf.GGUFWriter(str(path), keys.pop("arch", "t5"))
    arch = writer.arch
    given: dict[str, Any] = {
        f"{arch}.context_length": 512, f"{arch}.embedding_length": c.d_model,
        f"{arch}.feed_forward_length": c.d_ff, f"{arch}.block_count": c.num_layers,
        f"{arch}.decoder_block_count": c.num_decoder_layers, f"{arch}.attention.head_count": c.num_heads,
        f"{arch}.attention.key_length": c.d_kv, f"{arch}.attention.value_length": c.d_kv,
        f"{arch}.attention.layer_norm_rms_epsilon": c.layer_norm_epsilon,
        f"{arch}.attention.relative_buckets_count": c.relative_attention_num_buckets,
        f"{arch}.decoder_start_token_id": c.decoder_start_token_id,
        "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.padding_token_id": 2, "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.add_space_prefix": True, "tokenizer.ggml.remove_extra_whitespaces": True,
    }  # fmt: skip
    given |= {name.replace("__", "."): value for name, value in keys.items()}
    for name, value in given.items():
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    tokens, scores, kinds = vocabulary(c.vocab_size)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, max(c.num_layers, c.num_decoder_layers))
    written = set[str]()
    for name, tensor in state.items():
        if name == "lm_head.weight" and np.array_equal(tensor, state["shared.weight"]):
            continue
        shared = "embed_tokens" in name
        target = names.get_name("shared.weight" if shared else name, try_suffixes=(".weight",))
        assert target is not None, name
        if target not in written and target != leave_out:
            stored = kind if tensor.dim() > 1 and "rel_b" not in target else Kind.F32
            data = np.ascontiguousarray(tensor.numpy())
            writer.add_tensor(target, gguf.quants.quantize(data, stored), raw_dtype=stored)
        written.add(target)
    finish(writer)
    return path
