"""Tokenizers: round trips, streams without half characters, chat templates in their sandbox."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer as Core, models, pre_tokenizers, processors

from outrider.errors import ModelError
from outrider.models.fetch import default_model
from outrider.models.gguf_file import _SPLITS, GGUF, adds_bos, build_tokenizer
from outrider.models.tokenizer import _ALPHABET, ChatTemplate, Tokenizer

from support import tiny
from support.examples import examples

TEXTS = [
    "Hello, world!",
    "  two  spaces\n\n\n\tx = 12345.67e-8 # ½ ²",
    "naïve café — “quotes” … 日本語 🙂👩‍👩‍👧 ١٢٣ é e\u0301",
    "def f(x):\n    return x**2  \r\n\r\n",
    "it's we'll I'VE don't",
    "<|im_start|>user <s> </s> <0x41>",
    "",
    " ",
    "a",
]


def byte_level() -> Core:
    core = tiny.tokenizer(TEXTS * 5, ("<s>", "</s>"), 400)
    core.add_tokens([AddedToken("<a b>", normalized=False)])
    return core


def sentencepiece_header(**keys: Any) -> dict[str, Any]:
    """A small SentencePiece-BPE vocabulary as in a GGUF header: later merges score lower."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    merged = ["▁t", "he", "▁the", "in", "er", "▁a", "▁the▁", "ing", "▁▁", "▁▁▁▁", "qu", "ick", "ck", "é", "日本"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyzé.,!日本"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *merged, *[c for c in letters if c not in merged]]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    header = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores}
    header |= {"bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{key}": value for key, value in (header | keys).items()}


class Header:
    """Stands in for an open GGUF file."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata


def from_header(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(Header(metadata))  # type: ignore[arg-type]


def words() -> Core:
    core = Core(models.WordLevel({"one": 0, "two": 1, "three": 2, "?": 3}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return core


BYTE_LEVEL = Tokenizer(byte_level(), bos_id=0, eos_id=1)
SENTENCEPIECE = from_header(sentencepiece_header())
KINDS = {"byte level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE, "words": Tokenizer(words())}


# --- there and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_round_trip(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(map(tokenizer.id_to_bytes, ids)).decode().removeprefix(" " * tokenizer.strip) == text


@given(st.text())
@examples(200)
def test_round_trip_of_any_text(text: str) -> None:
    clean = text.encode("utf-8", "replace").decode()
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        if "▁" not in text:  # SentencePiece spells a space with it
            assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == clean


def test_special_tokens_are_parsed_only_when_asked() -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        bos, eos = tokenizer.bos_id, next(iter(tokenizer.eos_ids))
        assert {bos, eos}.isdisjoint(tokenizer.encode("<s>a</s>"))
        ids = tokenizer.encode("<s>a</s>", special=True)
        assert (ids[0], ids[-1]) == (bos, eos)
        assert tokenizer.decode(ids) == "a"
        assert "<s>" in tokenizer.decode(ids, skip_special=False)
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("x<a b>y")) == "x<a b>y"


def test_ids_without_a_text_are_silent() -> None:
    assert BYTE_LEVEL.decode([10**6, *BYTE_LEVEL.encode("a")]) == "a"
    assert BYTE_LEVEL.id_to_piece(10**6) == ""


@given(st.lists(st.integers(0, 405)))
def test_byte_level_decoding_is_that_of_tokenizers(ids: list[int]) -> None:
    for skip in (True, False):
        assert BYTE_LEVEL.decode(ids, skip) == BYTE_LEVEL._core.decode(ids, skip_special_tokens=skip)


# --- streams ------------------------------------------------------------------------------------------------------


@given(st.data())
@examples(300)
def test_any_split_of_a_stream_gives_the_text_of_decode(data: st.DataObject) -> None:
    tokenizer = KINDS[data.draw(st.sampled_from(list(KINDS)))]
    one = st.one_of(st.integers(0, tokenizer.vocab_size + 2), st.integers(0, 300))
    parts = data.draw(st.lists(st.lists(one, max_size=5), max_size=12))
    skip, continuing = data.draw(st.booleans()), data.draw(st.booleans())
    stream = tokenizer.stream(skip, continuing)
    shown = "".join(stream.push(part) for part in parts) + stream.flush()
    assert shown == tokenizer.decode([i for part in parts for i in part], skip, continuing)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="▁\ufffd")))
def test_a_stream_of_good_text_never_shows_half_a_character(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        stream, shown = tokenizer.stream(), ""
        for i in tokenizer.encode(text):
            shown += stream.push([i])
            assert text.startswith(shown)
        assert (shown, stream.flush()) == (text, "")


def test_a_stream_that_ends_within_a_character() -> None:
    ids = BYTE_LEVEL.encode("ab🙂")
    stream = BYTE_LEVEL.stream()
    assert stream.push(ids[:-1]).startswith("ab")
    assert stream.flush() == "\ufffd"


def test_a_leading_space_belongs_to_a_continuation() -> None:
    ids = SENTENCEPIECE.encode("the quick")
    assert SENTENCEPIECE.decode(ids) == "the quick"
    assert SENTENCEPIECE.decode(ids, continuing=True) == " the quick"


# --- GGUF headers -------------------------------------------------------------------------------------------------


def reference_sentencepiece(text: str, header: dict[str, Any]) -> list[int]:
    """SentencePiece's algorithm, naively: merge the pair whose union scores best, leftmost first."""
    tokens, scores = header["tokenizer.ggml.tokens"], header["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not joins:
            return [j for p in pieces for j in ([ids[p]] if p in ids else [ids[f"<0x{b:02X}>"] for b in p.encode()])]
        at = -max(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@given(st.text(alphabet="theinrqucka é日本.🙂\n", max_size=40))
@examples(300)
def test_sentencepiece_from_gguf(text: str) -> None:
    assert SENTENCEPIECE.encode(text) == reference_sentencepiece(text, sentencepiece_header())


def test_bos_defaults() -> None:
    assert SENTENCEPIECE.add_bos
    assert SENTENCEPIECE.encode_prompt("a")[0] == 1
    assert not from_header(sentencepiece_header(add_bos_token=False)).add_bos
    assert adds_bos({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"})
    assert not adds_bos({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"})


def byte_level_header(pre: str) -> dict[str, Any]:
    core = json.loads(BYTE_LEVEL._core.to_str())["model"]
    tokens = sorted(core["vocab"], key=core["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in core["merges"]]
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("pre", sorted(_SPLITS))
def test_every_way_to_split_words_is_a_partition(pre: str) -> None:
    tokenizer = from_header(byte_level_header(pre))
    for text in TEXTS:
        if pre != "qwen2":  # Qwen2 composes characters first
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_of_smollm_stand_alone() -> None:
    core = build_tokenizer(byte_level_header("smollm"))
    cut = [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str("a 123 b4")]
    assert cut == ["a", "Ġ", "1", "2", "3", "Ġb", "4"]
    cut = [p for p, _ in build_tokenizer(byte_level_header("llama-bpe")).pre_tokenizer.pre_tokenize_str("a 12345")]
    assert cut == ["a", "Ġ", "123", "45"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.pre": "martian"}, "'martian'.*Hugging Face folder"),
        ({"tokenizer.ggml.merges": ["no such"]}, "damaged"),
    ],
)
def test_headers_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        from_header(byte_level_header("gpt-2") | change)


# --- folders ------------------------------------------------------------------------------------------------------


def save(folder: Path, **settings_: Any) -> Tokenizer:
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return Tokenizer.from_folder(folder)


def test_folder_settings(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "<s>"}')
    tokenizer = save(tmp_path, eos_token="</s>", chat_template="{{ messages[0].content }}{{ eos_token }}")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (0, {1}, False)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi</s>"
    (tmp_path / "chat_template.jinja").write_text("the file wins")
    assert Tokenizer.from_folder(tmp_path).render_chat([]) == "the file wins"


def test_folder_bos_from_the_post_processor(tmp_path: Path) -> None:
    core = byte_level()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.enable_truncation(2)
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.add_bos
    assert 0 not in tokenizer.encode("a")
    assert tokenizer.decode(tokenizer.encode_prompt("a long enough text")) == "a long enough text"


def test_one_of_several_templates(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert save(tmp_path, chat_template=templates).render_chat([]) == "yes"


# --- chat templates -----------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "<b>é</b>"}, {"role": "assistant", "content": "ok"}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m['role'] + ':' + m.content + ';' }}{% endfor %}", "user:<b>é</b>;assistant:ok;"),
        ("{{ messages | tojson }}", json.dumps(MESSAGES, ensure_ascii=False)),
        ("{{ bos_token }}{% if add_generation_prompt %}go{% endif %}{{ tools }}", "<s>goNone"),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("  {% if true %}\n    a\n  {% endif %}\n", "    a\n"),
        ("{{ enable_thinking }}", "False"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_templates(source: str, text: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, enable_thinking=False) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ ('' | attr('__class__')).x }}",
    ],
)
def test_templates_stay_in_the_sandbox(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "broken.*line 1"),
        ("{{ raise_exception('roles must alternate') }}", "does not accept.*roles must alternate"),
        ("{{ messages[0].nothing.more }}", "failed"),
        ("{{ 1 / 0 }}", "failed"),
    ],
)
def test_errors_of_templates(source: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ChatTemplate(source, {}).render(MESSAGES)


def test_messages_must_be_plain() -> None:
    with pytest.raises(ModelError, match="plain JSON"):
        ChatTemplate("", {}).render([{"role": "user", "content": object()}])
    with pytest.raises(ModelError, match="no chat template"):
        BYTE_LEVEL.encode_chat(MESSAGES)


# --- the default model --------------------------------------------------------------------------------------------

_GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@pytest.mark.real
def test_smollm2_is_gpt2_with_single_digits() -> None:
    """Against a naive byte-pair encoding."""
    file = GGUF(default_model())
    tokenizer = Tokenizer.from_gguf(file)
    ids = {token: i for i, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(file.metadata["tokenizer.ggml.merges"])}
    spell = {bytes([b]): c for c, b in _ALPHABET.items()}

    def encode(word: str) -> list[int]:
        parts = [spell[bytes([b])] for b in word.encode()]
        while joins := [(ranks[p], i) for i, p in enumerate(pairwise(parts)) if p in ranks]:
            at = min(joins)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [ids[part] for part in parts]

    for text in [*TEXTS, Path(__file__).read_text(encoding="utf-8")[:4000]]:
        cut = [word for part in regex.split(r"(\p{N})", text) for word in _GPT2.findall(part)]
        assert tokenizer.encode(text) == [i for word in cut for i in encode(word)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.real
def test_smollm2_chat() -> None:
    tokenizer = Tokenizer.from_gguf(GGUF(default_model()))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.render_chat(messages)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("hi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode_chat(messages)[:8] == [1, 9690, 198, 2683, 359, 253, 5356, 5646]
    assert tokenizer.encode("<|im_start|>") != [1]
