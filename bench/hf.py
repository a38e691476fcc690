"""A checkpoint as a transformers model, built from the same file that Outrider reads."""

from __future__ import annotations

import torch
import transformers

from outrider.models.checkpoint import Checkpoint

KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def in_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """A transformers model, ready to generate; none of Outrider's code runs in it."""
    c, kind = checkpoint.config, KINDS[checkpoint.config.architecture]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=c.context_length,
        tie_word_embeddings=c.tied,
        attention_bias=c.o_bias,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    names = checkpoint.weights.names()
    state = {n if n.startswith("lm_head") else f"model.{n}": checkpoint.weights.get(n, dtype) for n in names}
    if c.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing, missing
    assert not [n for n in unexpected if "rope" not in n], unexpected
    return model.eval()
