"""Published drafters, written down once more: numpy in float64, one row after the other, nothing of ours imported.

`Llama` reads a target's folder and gives its states at every boundary; the drafts below follow the definitions of
EAGLE-3, P-EAGLE, EAGLE-1, MTP, Medusa and MLP speculators.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = Any
Weights = dict[str, Array]


def rms(x: Array, weight: Array, eps: float) -> Array:
    return weight * x / np.sqrt(np.mean(x * x) + eps)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])


def rotated(x: Array, position: int, theta: float) -> Array:
    """Pairs (i, i + d/2)."""
    d = x.shape[-1]
    angle = position * theta ** (-2 * np.arange(d // 2) / d)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


class Attention:
    """One layer's attention over the rows that it has seen so far."""

    def __init__(self, w: Weights, at: str, sizes: dict[str, Any], window: int = 0) -> None:
        self.w, self.at, self.sizes, self.window = w, f"{at}.self_attn", sizes, window
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def project(self, name: str, x: Array) -> Array:
        y = self.w[f"{self.at}.{name}_proj.weight"] @ x
        return y + self.w.get(f"{self.at}.{name}_proj.bias", 0.0)

    def __call__(self, x: Array, position: int) -> Array:
        s = self.sizes
        heads, kv, d = s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"]
        q, k = self.project("q", x).reshape(heads, d), self.project("k", x).reshape(kv, d)
        if f"{self.at}.q_norm.weight" in self.w:
            q = np.stack([rms(row, self.w[f"{self.at}.q_norm.weight"], s["rms_norm_eps"]) for row in q])
            k = np.stack([rms(row, self.w[f"{self.at}.k_norm.weight"], s["rms_norm_eps"]) for row in k])
        self.keys.append(rotated(k, position, s["rope_theta"]))
        self.values.append(self.project("v", x).reshape(kv, d))
        q, seen = rotated(q, position, s["rope_theta"]), slice(-self.window if self.window else None, None)
        mixed = []
        for head in range(heads):
            group = head // (heads // kv)
            scores = np.array([q[head] @ key[group] for key in self.keys[seen]]) / math.sqrt(d)
            shares = np.exp(scores - scores.max())
            values = np.stack([value[group] for value in self.values[seen]])
            mixed.append(shares / shares.sum() @ values)
        return self.w[f"{self.at}.o_proj.weight"] @ np.concatenate(mixed)


def mlp(w: Weights, at: str, x: Array) -> Array:
    gate, up = w[f"{at}.mlp.gate_proj.weight"] @ x, w[f"{at}.mlp.up_proj.weight"] @ x
    return w[f"{at}.mlp.down_proj.weight"] @ (silu(gate) * up)


class Llama:
    """A target's folder: its states and its choices."""

    def __init__(self, folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text())
        self.sizes = {"rms_norm_eps": 1e-6, "rope_theta": 1e4} | data
        self.sizes["head_dim"] = data["hidden_size"] // data["num_attention_heads"]
        stored = load_file(folder / "model.safetensors")
        self.w = {name.removeprefix("model."): tensor.astype(np.float64) for name, tensor in stored.items()}
        self.layers = data["num_hidden_layers"]

    def states(self, tokens: list[int]) -> list[list[Array]]:
        """For each position, the residual stream at boundaries 0 (the embedding) to L (before the last norm)."""
        attentions = [Attention(self.w, f"layers.{i}", self.sizes) for i in range(self.layers)]
        eps, rows = self.sizes["rms_norm_eps"], []
        for position, token in enumerate(tokens):
            x = self.w["embed_tokens.weight"][token]
            row = [x]
            for i in range(self.layers):
                at = f"layers.{i}"
                x = x + attentions[i](rms(x, self.w[f"{at}.input_layernorm.weight"], eps), position)
                x = x + mlp(self.w, at, rms(x, self.w[f"{at}.post_attention_layernorm.weight"], eps))
                row.append(x)
            rows.append(row)
        return rows

    def final(self, state: Array) -> Array:
        """After the last norm."""
        return rms(state, self.w["norm.weight"], self.sizes["rms_norm_eps"])

    def choice(self, state: Array) -> int:
        return int(np.argmax(self.w["lm_head.weight"] @ self.final(state)))


class Eagle3:
    """A head: `flags` are norm_before_residual, norm_output, windows, and mask (a token) for P-EAGLE."""

    def __init__(self, target: Llama, w: Weights, sizes: dict[str, Any], boundaries: list[int], **flags: Any) -> None:
        self.target, self.sizes, self.boundaries, self.flags = target, sizes, boundaries, flags
        self.w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in w.items()}
        self.embedding = self.w.get("embed_tokens.weight", target.w["embed_tokens.weight"])
        self.output = self.w.get("lm_head.weight", target.w["lm_head.weight"])
        count = self.output.shape[0]
        self.ids = np.arange(count) + self.w.get("d2t", np.zeros(count)).astype(int)

    def fused(self, states: list[Array]) -> Array:
        eps = self.sizes["rms_norm_eps"]
        if "fc.weight" not in self.w:
            return self.target.final(states[0])
        taps = [rms(s, self.w[f"fc_norm.{i}.weight"], eps) if "fc_norm.0.weight" in self.w else s
                for i, s in enumerate(states)]  # fmt: skip
        joined = np.concatenate(taps)
        if "input_norm.weight" in self.w:
            joined = rms(joined, self.w["input_norm.weight"], eps)
        return self.w["fc.weight"] @ joined

    def row(self, attentions: list[Attention], token: int, feature: Array, position: int) -> tuple[int, Array]:
        """The drafted token after this row, and what the next row continues from."""
        w, eps = self.w, self.sizes["rms_norm_eps"]
        a = rms(self.embedding[token], w["midlayer.input_layernorm.weight"], eps)
        c = rms(feature, w["midlayer.hidden_norm.weight"], eps)
        x = c if self.flags.get("norm_before_residual") else feature
        for i, attention in enumerate(attentions):
            at = "midlayer" if i == 0 else f"layers.{i}"
            inputs = np.concatenate([a, c]) if i == 0 else rms(x, w[f"{at}.input_layernorm.weight"], eps)
            x = x + attention(inputs, position)
            x = x + mlp(w, at, rms(x, w[f"{at}.post_attention_layernorm.weight"], eps))
        normed = rms(x, w["norm.weight"], eps)
        chosen = int(self.ids[int(np.argmax(self.output @ normed))])
        return chosen, normed if self.flags.get("norm_output") else x

    def attentions(self) -> list[Attention]:
        windows = self.flags.get("windows") or [0] * self.sizes.get("num_hidden_layers", 1)
        names = ["midlayer", *(f"layers.{i}" for i in range(1, len(windows)))]
        return [Attention(self.w, at, self.sizes, window) for at, window in zip(names, windows, strict=True)]

    def draft(self, tokens: list[int], k: int) -> list[int]:
        states, attentions = self.target.states(tokens[:-1]), self.attentions()
        drafted, x = 0, np.zeros(0)
        for p, row in enumerate(states):
            drafted, x = self.row(attentions, tokens[p + 1], self.fused([row[b] for b in self.boundaries]), p)
        chain, position = [drafted], len(states)
        while len(chain) < k:
            token, feature = chain[-1], x
            if "mask" in self.flags:
                mask = self.w["mask_hidden"].reshape(-1)
                token, feature = self.flags["mask"], self.fused(np.split(mask, len(self.boundaries)))
            drafted, x = self.row(attentions, token, feature, position)
            chain.append(drafted)
            position += 1
        return chain


class Eagle1(Eagle3):
    """The target's last state after its norm; no norm before attention and none before the target's output."""

    def row(self, attentions: list[Attention], token: int, feature: Array, position: int) -> tuple[int, Array]:
        w, eps = self.w, self.sizes["rms_norm_eps"]
        x = w["fc.weight"] @ np.concatenate([self.embedding[token], feature]) + w.get("fc.bias", 0.0)
        x = x + attentions[0](x, position)
        x = x + mlp(w, "midlayer", rms(x, w["midlayer.post_attention_layernorm.weight"], eps))
        return int(np.argmax(self.target.w["lm_head.weight"] @ x)), x

    def fused(self, states: list[Array]) -> Array:
        return self.target.final(states[0])


class NormedEagle1(Eagle3):
    """EAGLE-1 with norms of the token, before attention and before the output. `flags`: normed (the target's state is
    read after its last norm), norm_output (drafts continue from the output after its norm)."""

    # The norms of the token and of the state, the product, the layer, the last norm.
    names: tuple[str, str | None, str, str, str] = (
        "embedding_layernorm", None, "fusion_fc", "transformer", "pre_lm_head_layernorm",
    )  # fmt: skip

    def norm(self, name: str, x: Array) -> Array:
        return rms(x, self.w[f"{name}.weight"], self.sizes["rms_norm_eps"])

    def row(self, attentions: list[Attention], token: int, feature: Array, position: int) -> tuple[int, Array]:
        token_norm, state_norm, product, at, last = self.names
        state = feature if state_norm is None else self.norm(state_norm, feature)
        joined = np.concatenate([self.norm(token_norm, self.embedding[token]), state])
        x = self.w[f"{product}.weight"] @ joined + self.w.get(f"{product}.bias", 0.0)
        x = x + attentions[0](self.norm(f"{at}.input_layernorm", x), position)
        x = x + mlp(self.w, at, self.norm(f"{at}.post_attention_layernorm", x))
        normed = self.norm(last, x)
        return int(np.argmax(self.output @ normed)), normed if self.flags["norm_output"] else x

    def attentions(self) -> list[Attention]:
        return [Attention(self.w, self.names[3], self.sizes)]

    def fused(self, states: list[Array]) -> Array:
        return self.target.final(states[0]) if self.flags["normed"] else states[0]


class Mtp(NormedEagle1):
    """speculators' MTP: the state has a norm too, and drafts continue from the output after its norm."""

    names = (
        "mtp_layers.0.token_layernorm", "mtp_layers.0.hidden_layernorm", "mtp_layers.0.input_proj", "mtp_layers.0",
        "mtp_layers.0.final_layernorm",
    )  # fmt: skip


class DFlash:
    """A block of masks that see each other, over keys and values of the target's fused states. `flags`: block, mask (a
    token), causal, windows (by layer), two_sided (these end at the block, which every row sees), anchored (the first
    row predicts too, and each one the token after its own), corrected_from for Domino (the first token of a draft that
    its state over the tokens before corrects), top for DFlash2 (candidates), passes for XPress, scale, cap and
    embedding_scale."""

    def __init__(self, target: Llama, w: Weights, sizes: dict[str, Any], boundaries: list[int], **flags: Any) -> None:
        self.target, self.sizes, self.boundaries, self.flags = target, sizes, boundaries, flags
        self.w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in w.items()}
        embedding, output = (target.w[f"{name}.weight"] for name in ("embed_tokens", "lm_head"))
        self.embedding, count = embedding, len(self.w.get("d2t", output))
        self.ids = np.arange(count) + self.w.get("d2t", np.zeros(count)).astype(int)
        self.output = output[self.ids]
        self.mask = self.w.get("mask_embedding", embedding[flags["mask"]])

    def heads(self, name: str, i: int, x: Array, position: int) -> Array:
        """q or k of a row, normed and rotated; v as it is."""
        at, s = f"layers.{i}.self_attn", self.sizes
        each = (self.w[f"{at}.{name}_proj.weight"] @ x).reshape(-1, s["head_dim"])
        if f"{at}.{name}_norm.weight" in self.w:
            each = np.stack([rms(row, self.w[f"{at}.{name}_norm.weight"], s["rms_norm_eps"]) for row in each])
        return each if name == "v" else rotated(each, position, s["rope_theta"])

    def attention(self, i: int, rows: list[Array], context: list[Array]) -> list[Array]:
        s, n = self.sizes, len(context)
        seen = [*context, *rows]
        keys, values = ([self.heads(name, i, x, p) for p, x in enumerate(seen)] for name in "kv")
        window = (self.flags.get("windows") or [0] * s["num_hidden_layers"])[i]
        mixed = []
        for j, row in enumerate(rows):
            ends_here = self.flags.get("causal") or (window and not self.flags.get("two_sided"))
            stop = n + j + 1 if ends_here else len(seen)
            visible = range(max(0, (stop if ends_here else n) - window) if window else 0, stop)
            q, out = self.heads("q", i, row, n + j), []
            for head in range(len(q)):
                group = head // (len(q) // len(keys[0]))
                scores = np.array([q[head] @ keys[p][group] for p in visible]) / math.sqrt(s["head_dim"])
                shares = np.exp(scores - scores.max())
                out.append(shares / shares.sum() @ np.stack([values[p][group] for p in visible]))
            mixed.append(self.w[f"layers.{i}.self_attn.o_proj.weight"] @ np.concatenate(out))
        return mixed

    def hidden(self, tokens: list[int]) -> list[Array]:
        """The block's rows after the last norm."""
        w, eps = self.w, self.sizes["rms_norm_eps"]
        states = self.target.states(tokens[:-1])
        fused = [w["fc.weight"] @ np.concatenate([row[b] for b in self.boundaries]) for row in states]
        context = [rms(one, w["hidden_norm.weight"], eps) for one in fused]
        rows = [self.embedding[tokens[-1]], *[self.mask] * (self.flags["block"] - 1)]
        rows = [self.flags.get("embedding_scale", 1.0) * x for x in rows]
        for i in range(self.sizes["num_hidden_layers"]):
            at = f"layers.{i}"
            inner: list[tuple[str, str, Any]] = [
                ("input_layernorm", "attention_conv", lambda given, i=i: self.attention(i, given, context)),
                ("post_attention_layernorm", "mlp_conv", lambda given, at=at: [mlp(w, at, x) for x in given]),
            ]
            for norm, name, run in inner:
                added = self.convolved(f"{at}.{name}", [rms(x, w[f"{at}.{norm}.weight"], eps) for x in rows], run)
                rows = [x + y for x, y in zip(rows, added, strict=True)]
        return [rms(x, w["norm.weight"], eps) for x in rows]

    def convolved(self, name: str, rows: list[Array], run: Any) -> list[Array]:
        """What `run` makes of rows, for DFlash2 with a convolution before it and one after it."""
        if f"{name}.base_kernel" not in self.w:
            return list(run(rows))
        base, projection = self.w[f"{name}.base_kernel"], self.w[f"{name}.kernel_projection.weight"]
        own = [(projection @ x).reshape(2, base.shape[1], -1) for x in rows]
        size = base.shape[2] // own[0].shape[2]

        def mixed(side: int, given: list[Array]) -> list[Array]:
            return [
                sum((base[side, t] + np.repeat(own[j][side, t], size)) * given[j - t]
                    for t in range(min(base.shape[1], j + 1)))
                for j in range(len(given))
            ]  # fmt: skip

        return mixed(1, run(mixed(0, rows)))

    def scores(self, row: Array) -> Array:
        scores, cap = self.flags.get("scale", 1.0) * (self.output @ row), self.flags.get("cap", 0.0)
        return cap * np.tanh(scores / cap) if cap else scores

    def selected(self, scores: Array, row: Array, before: int) -> Array:
        """DFlash2's choice among the best, by the token before."""
        part = {name: self.w[f"candidate_selector.{name}"] for name in ("predecessor_codebook", "successor_codebook")}
        seen = part["predecessor_codebook"][before] * (self.w["candidate_selector.hidden_projection.weight"] @ row)
        best = np.argsort(-scores)[: self.flags["top"]]
        others = np.full(len(scores), -np.inf)
        others[best] = scores[best] + part["successor_codebook"][best] @ seen
        return others

    def with_bias(self, name: str, parts: list[Array]) -> Array:
        """Of DSpark's term."""
        at = f"markov_head.{name}"
        return self.w[f"{at}.weight"] @ np.concatenate(parts) + self.w[f"{at}.bias"]

    def prefix(self, tokens: list[int]) -> Array:
        """Domino's state after these tokens."""
        state = np.zeros(self.w["prefix_gru.weight_hh_l0"].shape[1])
        for token in tokens:
            new = np.split(self.w["prefix_gru.weight_ih_l0"] @ self.embedding[token], 3)
            old = np.split(self.w["prefix_gru.weight_hh_l0"] @ state, 3)
            reset, keep = (sigmoid(new[i] + old[i]) for i in (0, 1))
            state = (1 - keep) * np.tanh(new[2] + reset * old[2]) + keep * state
        return state

    def refined(self, tokens: list[int]) -> list[int]:
        """XPress's block: what its passes find, one after the other."""
        rows, w = self.hidden(tokens), {n.removeprefix("refiner_head."): t for n, t in self.w.items()}
        scores, mean, shift = [self.scores(row) for row in rows], np.mean(rows, 0), not self.flags.get("anchored")
        guess = [int(self.ids[int(np.argmax(one))]) for one in scores]
        for _ in range(self.flags["passes"]):
            before = [tokens[-2], tokens[-1], *guess[1:-1]] if shift else [tokens[-1], *guess[:-1]]
            given = [
                w["in_proj.weight"] @ np.concatenate(
                    [w["down_h.weight"] @ row, w["down_g.weight"] @ mean, w["token_embed.weight"][token]]
                )
                for row, token in zip(rows, before, strict=True)
            ]  # fmt: skip
            for i, one in enumerate(scores):
                x = given[i] + sum(w["mix_l"][:, i, j] * given[j] for j in range(i + 1))
                x = x + w["mlp_down.weight"] @ (silu(w["mlp_gate.weight"] @ x) * (w["mlp_up.weight"] @ x))
                guess[i] = int(self.ids[int(np.argmax(one + w["readout.weight"] @ x))])
        return guess[shift:]

    def draft(self, tokens: list[int], k: int) -> list[int]:
        if "refiner_head.mix_l" in self.w:
            return self.refined(tokens)[:k]
        chain: list[int] = []
        first, markov = 0 if self.flags.get("anchored") else 1, "markov_head.markov_w1.weight" in self.w
        state = np.zeros(self.w["markov_head.markov_w1.weight"].shape[1] if markov else 0)
        for row in self.hidden(tokens)[first : first + k]:
            scores, before = self.scores(row), [*tokens, *chain][-1]
            if "candidate_selector.predecessor_codebook" in self.w:
                scores = self.selected(scores, row, before)
            if "prefix_gru.weight_hh_l0" in self.w and len(chain) >= self.flags["corrected_from"]:
                both = np.concatenate([row, self.prefix([tokens[-1], *chain])])
                scores = scores + self.w["embed_proj.2.weight"] @ silu(self.w["embed_proj.0.weight"] @ both)
            if markov:
                seen = self.w["markov_head.markov_w1.weight"][before]
                if "markov_head.gate_proj.weight" in self.w:
                    seen = seen * sigmoid(self.with_bias("gate_proj", [row, seen]))
                if "markov_head.joint_proj.weight" in self.w:
                    gate, candidate, shown = np.split(self.with_bias("joint_proj", [state, seen, row]), 3)
                    state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
                    seen = np.tanh(shown)
                scores = scores + self.w["markov_head.markov_w2.weight"] @ seen
            chain.append(int(self.ids[int(np.argmax(scores))]))
        return chain


class Medusa:
    def __init__(self, target: Llama, w: Weights, positions: int, blocks: int) -> None:
        self.target, self.positions, self.blocks = target, positions, blocks
        self.w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in w.items()}

    def draft(self, tokens: list[int], k: int) -> list[int]:
        f, chain = self.target.final(self.target.states(tokens[:-1])[-1][-1]), []
        for i in range(min(k, self.positions)):
            x = f
            for j in range(self.blocks):
                x = x + silu(self.w[f"{i}.{j}.linear.weight"] @ x + self.w.get(f"{i}.{j}.linear.bias", 0.0))
            chosen = int(np.argmax(self.w[f"{i}.{self.blocks}.weight"] @ x))
            chain.append(int(self.w["token_map"][chosen]) if "token_map" in self.w else chosen)
        return chain


class MlpSpeculator:
    def __init__(self, target: Llama, w: Weights, positions: int, scale_input: bool, tied: bool) -> None:
        self.target, self.positions, self.scale_input, self.tied = target, positions, scale_input, tied
        self.w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in w.items()}

    def weight(self, part: str, i: int) -> Array:
        index = (min(i, 1) if part.startswith("proj") else 0) if self.tied else i
        name, _, field = part.partition(".")
        return self.w[f"speculator.{name}.{index}.{field or 'weight'}"]

    def draft(self, tokens: list[int], k: int) -> list[int]:
        s, token, chain = self.target.final(self.target.states(tokens[:-1])[-1][-1]), tokens[-1], list[int]()
        if self.scale_input:
            s = rms(s, 1.0, 1e-6) / math.sqrt(2)
        for i in range(min(k, self.positions)):
            inner, kept = self.weight("ln", i).shape[0], 0.5 ** (0.5 / self.positions)
            new = math.sqrt((1 - kept**2) * inner / 2)
            s = self.weight("proj", i) @ s + new / kept * self.weight("emb", i)[token]
            s = gelu(rms(s, self.weight("ln", i), 1e-6) + self.weight("ln.bias", i))
            token = int(np.argmax(self.weight("head", i) @ s))
            chain.append(token)
        return chain
