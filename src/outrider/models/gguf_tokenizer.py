"""A `tokenizers` tokenizer out of a GGUF header.

Promise: the same ids as the tokenizer the model was trained with, for byte-level BPE (`gpt2`) and SentencePiece-BPE
(`llama`); a way of splitting words that is not known is refused, because guessing would cost quality silently.
This file knows llama.cpp's names for these; it knows nothing of chats or of streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import ModelError

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")  # llama.cpp's, for files that name none

# The name in `tokenizer.ggml.pre` -> the expressions that cut text into words, one after another.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
    "tekken": (_TEKKEN,),
    "default": _DEFAULT,
}
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}  # a word in the vocabulary is not merged up


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF header describes."""
    kind, tokens = metadata.get(_KEY + "model"), metadata.get(_KEY + "tokens")
    if not kind or not tokens:
        raise ModelError("The GGUF file has no tokenizer in it; use a file converted with its vocabulary.")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"The GGUF file's tokenizer is of the kind '{kind}'; Outrider reads 'gpt2' and 'llama'.")
    try:
        core = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens)
    except ModelError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exceptions for a vocabulary that does not fit together
        raise ModelError(f"The GGUF file's tokenizer is damaged ({error}); download the file again.") from error
    _add_special(core, tokens, _kinds(metadata, tokens))
    return core


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether texts begin with the BOS token; files that do not say follow llama.cpp's habit."""
    said = metadata.get(_KEY + "add_bos_token")
    habit = metadata.get(_KEY + "model") == "llama" or split_name(metadata) in _WHOLE_WORDS
    return habit if said is None else bool(said)


def split_name(metadata: Mapping[str, Any]) -> str:
    """How words are cut; old files do not say, so the architecture has to."""
    name = metadata.get(_KEY + "pre")
    if name:
        return str(name)
    if str(metadata.get("general.architecture")).startswith("qwen"):
        return "qwen2"
    return "llama-bpe" if len(metadata.get(_KEY + "tokens", ())) == 128_256 else "default"


def _kinds(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    kinds: list[int] = metadata.get(_KEY + "token_type") or [_NORMAL] * len(tokens)
    return kinds


def _add_special(core: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special; user-defined ones are found in any text, before it is cut into words."""
    both = list(zip(tokens, kinds, strict=False))
    special = [AddedToken(t, special=True, normalized=False) for t, k in both if k in (_UNKNOWN, _CONTROL)]
    plain = [AddedToken(t, special=False, normalized=False) for t, k in both if k == _USER_DEFINED]
    core.add_special_tokens(special)
    core.add_tokens(plain)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    name = split_name(metadata)
    if name not in _SPLITS:
        raise ModelError(
            f"The GGUF file's tokenizer splits words in the way '{name}', which is not known; use the model's "
            f"Hugging Face folder instead, or a file with one of {', '.join(sorted(_SPLITS))}."
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    left_right = [merge.partition(" ") for merge in metadata.get(_KEY + "merges") or []]
    merges = [(left, right) for left, _, right in left_right]
    core = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS))
    if name == "qwen2":
        core.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _SPLITS[name]]
    core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece-BPE joins the neighbours whose union scores best: a BPE whose merges are ranked by score."""
    kinds = _kinds(metadata, tokens)
    scores: list[float] = metadata.get(_KEY + "scores") or [-float(i) for i in range(len(tokens))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = next((t for t, k in zip(tokens, kinds, strict=False) if k == _UNKNOWN), None)
    merges = _merges(vocabulary, scores, kinds)
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get(_KEY + "add_space_prefix")
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix is None or prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    core.normalizer, core.decoder = normalizers.Sequence(spaces), decoders.Sequence(ends)
    return core


def _merges(vocabulary: dict[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Every way to make a normal token of two others, best score first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in vocabulary.items():
        if kinds[i] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[i], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
