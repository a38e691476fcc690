"""Text to ids and back, whole or as a stream; chat templates.

Promise: `decode` and `Stream` give the same text however the ids are split; a stream never shows half a character, and
its work per token is bounded, because every token is a fixed string of bytes. A chat template runs in a sandbox: it
sees the messages as JSON values and nothing else, and every error in it is a ModelError.
It knows text and ids; it knows nothing of models.
"""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Tokenizer as Core

from ..errors import ModelError
from .config import token_ids
from .gguf_file import GGUF, adds_bos, build_tokenizer, gguf_eos_ids
from .paths import write_json


class Tokenizer:
    """A model's tokenizer with its chat template."""

    def __init__(
        self, core: Core, bos_id: int | None = None, eos_id: int | None = None, eos_ids: frozenset[int] = frozenset(),
        add_bos: bool = False, chat_template: str | None = None,
    ) -> None:  # fmt: skip
        core.no_truncation()
        core.no_padding()
        self._core, self._lock = core, threading.Lock()
        self.vocab_size = int(core.get_vocab_size(with_added_tokens=True))  # a model's embedding may have more rows
        self.base_size = int(core.get_vocab_size(with_added_tokens=False))  # some models embed no added tokens
        self._named = {"bos_token": bos_id, "eos_token": eos_id}  # under the names that chat templates use
        self._special = {i for i, token in core.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._style, self.strip = _decoder(core)  # strip: leading spaces of a whole text that the tokenizer has added
        self._template: ChatTemplate | None = None  # compiled on first use
        self.bos_id, self.eos_id, self.add_bos = bos_id, eos_id, add_bos and bos_id is not None
        self.eos_ids = eos_ids if eos_id is None else eos_ids | {eos_id}
        self.chat_template = chat_template

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which compiles the template itself."""
        return vars(self) | {"_lock": None, "_template": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"_lock": threading.Lock()})

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From tokenizer.json and the settings files beside it."""
        core = _read_core(folder)
        settings = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
        texts = {name: _text(settings.get(f"{name}_token")) for name in ("bos", "eos")}
        ids = {name: None if text is None else core.token_to_id(text) for name, text in texts.items()}
        core.add_special_tokens([text for name, text in texts.items() if text is not None and ids[name] is not None])
        add_bos = settings.get("add_bos_token")
        if not isinstance(add_bos, bool):  # as the post-processor does
            add_bos = ids["bos"] is not None and core.encode("", add_special_tokens=True).ids[:1] == [ids["bos"]]
        file, template = folder / "chat_template.jinja", default_template(settings.get("chat_template"))
        template = file.read_text(encoding="utf-8") if file.is_file() else template
        return cls(core, ids["bos"], ids["eos"], add_bos=add_bos, chat_template=template)

    @staticmethod
    def from_gguf(file: GGUF) -> Tokenizer:
        """From a GGUF header."""
        data = file.metadata
        named = (token_ids(data.get(f"tokenizer.ggml.{name}_token_id")) for name in ("bos", "eos"))
        bos, eos = (next(iter(ids), None) for ids in named)
        template = data.get("tokenizer.chat_template")
        return Tokenizer(build_tokenizer(data), bos, eos, gguf_eos_ids(data), adds_bos(data), template)

    def save(self, folder: Path) -> None:
        """Write files from which `from_folder`, and transformers, make the same tokenizer."""
        with self._lock:
            self._core.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.add_bos}
        settings |= self._special_texts() | {"chat_template": self.chat_template}
        settings = {name: value for name, value in settings.items() if value is not None}
        write_json(folder / "tokenizer_config.json", settings)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token's text with its id."""
        pieces: dict[str, int] = self._core.get_vocab(with_added_tokens=True)
        return pieces

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text, without BOS. Control tokens in it are plain text unless `special` says to parse them."""
        text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate has no bytes to encode
        with self._lock:  # the flag belongs to the shared core
            self._core.encode_special_tokens = not special
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids

    def encode_answer(self, text: str) -> list[int]:
        """Ids of a text as the model would write it; some models cut their own texts otherwise than what they read."""
        return self.encode(text)

    def encode_prompt(self, text: str, special: bool = False) -> list[int]:
        """As `encode`, with BOS in front where this model's texts begin with it."""
        start = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        return start + self.encode(text, special)

    def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer. The template writes its own BOS."""
        return self.encode(self.render_chat(messages, **kwargs), special=True)

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as the text the model was trained on."""
        if self.chat_template is None:
            raise ModelError("The model has no chat template; give it a plain prompt instead of messages.")
        if self._template is None:
            self._template = ChatTemplate(self.chat_template, self._special_texts())
        return self._template.render(messages, add_generation_prompt, **kwargs)

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuing: bool = False) -> str:
        """Text of ids. `continuing`: they follow other text, so a leading space stays."""
        stream = Stream(self, skip_special, continuing)
        return stream.push(ids) + stream.flush()

    def stream(
        self, skip_special: bool = True, continuing: bool = False, shown: frozenset[int] = frozenset()
    ) -> Stream:
        """`shown` are special tokens that belong to the text."""
        return Stream(self, skip_special, continuing, shown)

    def id_to_piece(self, token: int) -> str:
        """One token as readable text, special ones too; bytes of an unfinished character become U+FFFD."""
        return self.id_to_bytes(token).decode("utf-8", "replace")

    def id_to_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text; none for an id without a text."""
        if token not in self._bytes:
            piece = self._core.id_to_token(token)
            self._bytes[token] = b"" if piece is None else _bytes_of(piece, self._style)
        return self._bytes[token]

    def whole_text(self, token: int) -> str | None:
        """The text of a token of whole characters, wherever it stands; None for others and for special ones."""
        if token not in self._texts:
            data = None if token in self._special else self.id_to_bytes(token)
            try:
                self._texts[token] = None if data is None else data.decode()
            except UnicodeDecodeError:
                self._texts[token] = None
        return self._texts[token]

    def token_to_id(self, piece: str) -> int | None:
        token: int | None = self._core.token_to_id(piece)
        return token

    def is_special(self, token: int) -> bool:
        return token in self._special

    def _special_texts(self) -> dict[str, str]:
        texts = {name: None if i is None else self._core.id_to_token(i) for name, i in self._named.items()}
        return {name: text for name, text in texts.items() if text is not None}


class Stream:
    """Decodes ids as they arrive; what `push` and `flush` return adds up to `decode` of all of them."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, continuing: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._tokenizer, self._skip, self._shown = tokenizer, skip_special, shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # keeps the bytes of an unfinished character
        self._strip = 0 if continuing else tokenizer.strip
        self._unfinished = False  # whether the decoder has bytes of an unfinished character

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        return "".join(map(self._push, ids))

    def _push(self, token: int) -> str:
        """The text that this id completes: most ids are whole characters, and always the same ones."""
        whole = None if self._unfinished or self._strip else self._tokenizer.whole_text(token)
        return self._decode(token) if whole is None else whole

    def _decode(self, token: int) -> str:
        if self._skip and self._tokenizer.is_special(token) and token not in self._shown:
            return ""
        text = self._utf8.decode(self._tokenizer.id_to_bytes(token))
        self._unfinished = bool(self._utf8.getstate()[0])
        return self._stripped(text)

    def flush(self) -> str:
        """What was held back: an unfinished character, as U+FFFD."""
        self._unfinished = False
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text, self._strip = text[1:], self._strip - 1
        return text


# ------------------------------------------------------------ how a tokenizer spells bytes

_BYTE_LEVEL, _SPACED, _WORDS = "byte level", "spaced", "words"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 upwards."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _decoder(core: Core) -> tuple[str, int]:
    """How tokens become text, and how many leading spaces of the whole text are stripped."""
    if core.decoder is None:
        return _WORDS, 1
    state = json.loads(core.decoder.__getstate__())
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    if "ByteLevel" in steps:
        return _BYTE_LEVEL, 0
    if "Metaspace" in steps:
        return _SPACED, int(steps["Metaspace"].get("prepend_scheme", "always") != "never")
    if "Replace" in steps or "ByteFallback" in steps:
        return _SPACED, int(steps.get("Strip", {}).get("start", 0))
    if steps.keys() <= {"Fuse"}:
        return _SPACED, 0
    raise ModelError(f"The tokenizer's decoder ({', '.join(steps)}) is not of a kind that Outrider knows.")


def _bytes_of(piece: str, style: str) -> bytes:
    if style == _BYTE_LEVEL:
        return bytes(_ALPHABET[c] for c in piece) if _ALPHABET.keys() >= set(piece) else piece.encode()
    if style == _WORDS:
        return b" " + piece.encode()
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's byte fallback
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()


def _read_core(folder: Path) -> Core:
    path = folder / "tokenizer.json"
    if not path.is_file():
        only = " (its tokenizer.model must be converted: save it once with transformers' AutoTokenizer)"
        raise ModelError(
            f"{folder} has no tokenizer.json{only if (folder / 'tokenizer.model').exists() else ''}; "
            "put the model's tokenizer files into it."
        )
    try:
        return Core.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise ModelError(f"{path} cannot be read ({error}); delete it and download it again.") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); delete it and download it again.") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} does not hold a JSON object; delete it and download it again.")
    return data


def _text(token: Any) -> str | None:
    """Special tokens are written as a string, or as an object with the string in `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def encode_message(tokenizer: Any, text: str) -> list[int]:
    """Ids of a user's message under the chat template, or of the plain text where there is none."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode_prompt(text))
    return list(tokenizer.encode_chat([{"role": "user", "content": text}]))


def default_template(template: Any) -> str | None:
    """A chat template that is given alone, or the default of several (a list of named ones, or a dictionary)."""
    if isinstance(template, list):
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


# ------------------------------------------------------------ chat templates


class _Refusal(TemplateError):
    """The template's own `raise_exception`: it does not accept these messages."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A template's variables. Names that begin with an underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # jinja2's own trick: `self` may be a variable
        Namespace.__init__(args[0], {_SafeNamespace._plain(k): v for k, v in dict(*args[1:], **kwargs).items()})

    def __setitem__(self, name: str, value: Any) -> None:
        Namespace.__setitem__(self, _SafeNamespace._plain(name), value)

    @staticmethod
    def _plain(name: str) -> str:
        if name.startswith("_"):
            raise SecurityError(f"the name {name!r} is not allowed in a namespace")
        return name


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as transformers writes it: jinja2's own filter escapes HTML, which models are not trained on."""
    options = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Access to a forbidden attribute is an error; jinja2 alone would render it as an empty string."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")


class ChatTemplate:
    """A compiled template: `render` turns messages into the text format that the model was trained on."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)  # texts of bos_token and eos_token
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.globals["namespace"] = _SafeNamespace
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"The model's chat template is broken: {error.message} (line {error.lineno}).") from error

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **extra: Any) -> str:
        values: dict[str, Any] = {"tools": None, "documents": None, **self._tokens, **_plain(extra)}
        values |= {"messages": _plain(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values)
        except _Refusal as error:
            raise ModelError(f"The model's chat template does not accept these messages: {error.message}.") from error
        except SecurityError as error:
            raise ModelError(f"The model's chat template tried something that is not allowed: {error}.") from error
        except Exception as error:  # a template is a program: it can fail in any way a program can
            raise ModelError(f"The model's chat template failed on these messages: {error}.") from error


def _plain(value: Any) -> Any:
    """Rebuilt from JSON, so that a template gets no object with methods of its own."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"Chat messages must be plain JSON values: {error}.") from error
