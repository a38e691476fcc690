"""T5 and Flan-T5 from GGUF files: the numbers of `transformers` in every precision, the tokenizer in the file, drafts
that change no text, and files with something wrong."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.backends.cpu import quantise as quant
from outrider.backends.cpu.int8 import Int8Decoder
from outrider.backends.transformer import Transformer
from outrider.cli.app import app
from outrider.errors import OutriderError
from outrider.models.checkpoint import Checkpoint, open_checkpoint
from outrider.testing import check_drafter

from support import pairs
from support.gguf_t5 import vocabulary, write_t5
from support.pairs import Bench, pair, source, text, their_logits

F32, BF16 = torch.float32, torch.bfloat16
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 4, "relative_attention_num_buckets": 12}
FILES: dict[str, dict[str, Any]] = {  # what llama.cpp runs: T5's relu, or gated gelu as Flan-T5 has it
    "t5 file": {"num_layers": 3},
    "t5 file, apart": {"num_layers": 2, "tie_word_embeddings": False},
    "flan file": {"num_layers": 2, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu",
                  "tie_word_embeddings": False},
    "flan file, tied": {"num_layers": 3, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu", "d_kv": 8},
}  # fmt: skip
pairs.CASES |= {name: ("t5", _T5 | changes) for name, changes in FILES.items()}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


@functools.cache
def model_of(case: str) -> Any:
    """The model of transformers; it shares its matrices until others are loaded."""
    theirs = copy.deepcopy(pair(case)[0])
    if not FILES[case].get("tie_word_embeddings", True):
        wide = torch.nn.Linear(32, pairs.V, bias=False)
        theirs.lm_head.weight = torch.nn.Parameter(wide.weight.detach() * 2)
    return theirs


def opened(tmp_path: Path, case: str, kind: Kind = Kind.F32, **keys: Any) -> tuple[Any, Checkpoint]:
    """The model of transformers, and its file."""
    theirs = model_of(case)
    return theirs, open_checkpoint(write_t5(tmp_path / "model.gguf", theirs, kind, **keys))


def run(model: Any) -> torch.Tensor:
    return Bench(model, text(), source()).logits(7)


@pytest.mark.parametrize("case", FILES)
def test_a_file_is_the_same_model(case: str, tmp_path: Path) -> None:
    """float32 as transformers, bfloat16 and int8 near it, chunks of any size with the same bits."""
    theirs, checkpoint = opened(tmp_path, case)
    config, wanted = checkpoint.config, their_logits(theirs, source(), text())
    of_folder = pair(case)[1]
    assert (config.starts, config.gated, config.logit_scale) == (
        of_folder.starts,
        of_folder.gated,
        of_folder.logit_scale,
    )
    assert config.eos_ids == frozenset({0})
    assert (config.encoder.layers, config.layers) == (theirs.config.num_layers, theirs.config.num_decoder_layers)  # type: ignore[union-attr]
    model = Transformer(config, checkpoint.weights, F32, length=80)
    torch.testing.assert_close(run(model), wanted, rtol=2e-4, atol=2e-4)
    assert torch.equal(run(model), Bench(model, text(), source()).logits(1))
    eight = Int8Decoder(config, quant.calibrated(config, checkpoint.weights, source(80)), 80)
    for other, least in ((Transformer(config, checkpoint.weights, BF16, length=80), 0.995), (eight, 0.97)):
        assert torch.cosine_similarity(run(other), wanted, dim=1).median() > least
        assert torch.equal(run(other), Bench(other, text(), source()).logits(1))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_quantised_blocks_are_read(kind: Kind, tmp_path: Path) -> None:
    """The model that the file's blocks stand for, whether its output matrix is there or not."""
    for case in ("t5 file", "flan file"):
        theirs, checkpoint = opened(tmp_path, case, kind)
        stored = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
        rounded = {
            name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)).clone()
            for name, tensor in stored.items()
            if tensor.dim() > 1 and "relative" not in name
        }
        try:
            theirs.load_state_dict(stored | rounded)
            wanted = their_logits(theirs, source(), text())
        finally:
            theirs.load_state_dict(stored)
        model = Transformer(checkpoint.config, checkpoint.weights, F32, length=80)
        torch.testing.assert_close(run(model), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("near", [True, False])
def test_an_output_matrix_that_is_the_embedding_is_scaled(near: bool, tmp_path: Path) -> None:
    """Files of T5 1.0 have that matrix twice, where the original had; another type rounds it otherwise."""
    theirs = model_of("t5 file, apart")
    own = theirs.lm_head.weight.data.clone()
    try:
        if near:
            theirs.lm_head.weight.data = theirs.shared.weight.data * 1.01  # as after rounding
        file = write_t5(tmp_path / "model.gguf", theirs)
    finally:
        theirs.lm_head.weight.data = own
    assert open_checkpoint(file).config.logit_scale == (32**-0.5 if near else 1.0)


@pytest.mark.parametrize("drafter", ["layerskip", "model", "suffix"])
def test_no_drafter_changes_a_files_text(drafter: str, tmp_path: Path) -> None:
    _, checkpoint = opened(tmp_path, "flan file", Kind.Q8_0)
    model = Transformer(checkpoint.config, checkpoint.weights, F32, length=80)
    small = Transformer(checkpoint.config, checkpoint.weights, BF16, length=80)
    options = {"layerskip": {"skip_mlp": [1]}, "model": {"draft_model": small}, "suffix": {}}[drafter]
    assert check_drafter(drafter, options, model, tokens=10)


def test_the_tokenizer_in_the_file(tmp_path: Path) -> None:
    """Likeliest pieces, an end, tokens of its own wherever they stand; control tokens are text unless asked for."""
    tokenizer = opened(tmp_path, "t5 file")[1].tokenizer
    ids = {token: i for i, token in enumerate(vocabulary(pairs.V)[0])}

    def named(*tokens: str) -> list[int]:
        return [ids[token] for token in tokens]

    assert tokenizer.encode_prompt("  the   cats ") == named("▁the", "▁cat", "s", "</s>")
    assert tokenizer.encode("the x cat") == named("▁the", "▁", "<unk>", "▁cat")
    assert tokenizer.encode("<extra_id_0> cat") == named("<extra_id_0>", "▁cat")
    assert not {ids["</s>"], ids["[PAD40]"]} & set(tokenizer.encode("the</s>cat [PAD40]", special=False))
    assert tokenizer.encode("the</s>", special=True) == named("▁the", "</s>")
    assert tokenizer.encode("[PAD40]", special=True) == tokenizer.encode("[PAD40]")
    assert tokenizer.decode(named("▁the", "▁cat", "s", "</s>", "<pad>", "[PAD40]")) == "the cats"
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.add_bos, tokenizer.base_size) == (0, None, False, pairs.V)
    with pytest.raises(OutriderError, match="cannot be written"):
        tokenizer.save(tmp_path)


def test_texts_as_they_are(tmp_path: Path) -> None:
    """A file may say that spaces stay as they are, and how characters are prepared."""
    keys = {"tokenizer__ggml__add_space_prefix": False, "tokenizer__ggml__remove_extra_whitespaces": False}
    tokenizer = opened(tmp_path, "t5 file", **keys)[1].tokenizer
    pieces = [tokenizer.id_to_piece(i) for i in tokenizer.encode("he  the")]
    assert pieces == ["he", " ", " the"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_a_file_answers_through_the_command_line(tmp_path: Path) -> None:
    """The text of transformers, with and without drafts; the model is listed as what it is."""
    theirs, checkpoint = opened(tmp_path, "flan file")
    prompt = checkpoint.tokenizer.encode_prompt("the cats. the cat")
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": 0, "use_cache": False}
    wanted = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)[
        0, 1:
    ].tolist()
    arguments = ["generate", "the cats. the cat", "-m", str(checkpoint.path), "-n", "16", "--json"]
    for more in (["--drafter", "off"], ["--drafter", "layerskip", "--set", "skip_layers=[1]", "--k", "3"]):
        done = CliRunner().invoke(app, [*arguments, "--dtype", "float32", *more])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["token_ids"] == wanted
    for dtype, code in (("auto", 0), ("int8", 0), ("gguf", 1)):
        done = CliRunner().invoke(app, [*arguments, "--dtype", dtype])
        assert done.exit_code == code, done.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arch": "t5encoder"}, "only the encoder of a T5"),
        ({"t5__attention__head_count": None}, "has no 'attention.head_count'"),
        ({"t5__block_count": 4}, "'encoder.layers.2."),
        ({"t5__decoder_block_count": 9}, "'layers.3."),
        ({"t5__attention__relative_buckets_count": 32}, "'distance_bias.weight' has the shape [12, 4]"),
        ({"t5__embedding_length": "wide"}, "strange value ('wide')"),
        ({"t5__decoder_start_token_id": None, "tokenizer__ggml__padding_token_id": None}, "how its answers begin"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer is of the kind 'bert'"),
        ({"tokenizer__ggml__eos_token_id": 500}, "is damaged"),
        ({"tokenizer__ggml__precompiled_charsmap": [1, 2, 3]}, "tokenizer is damaged"),
        ({"leave_out": "dec.blk.1.cross_attn_k.weight"}, "'layers.1.cross_attn.k_proj.weight'"),
        ({"leave_out": "enc.blk.0.attn_rel_b.weight"}, "'encoder.distance_bias.weight'"),
        ({"leave_out": "token_embd.weight"}, "no tensor 'token_embd.weight'"),
    ],
)
def test_what_is_wrong_is_reported_in_a_sentence(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(OutriderError) as error:
        LLM(write_t5(tmp_path / "model.gguf", model_of("flan file"), **change), drafter="off", device="cpu")
    assert says in str(error.value)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_a_bias_in_every_layer_is_refused(tmp_path: Path) -> None:
    """UMT5 has one, under the same architecture."""
    theirs = copy.copy(model_of("t5 file"))
    state = theirs.state_dict()
    name = "decoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    theirs.state_dict = lambda: state | {name.format(1): state[name.format(0)]}
    file = write_t5(tmp_path / "model.gguf", theirs)
    with pytest.raises(OutriderError, match="UMT5"):
        open_checkpoint(file)


def test_settings_of_a_request_apply(tmp_path: Path) -> None:
    """At a temperature too, where T5's scale of logits matters."""
    _, checkpoint = opened(tmp_path, "t5 file", Kind.Q8_0)
    llm = LLM(checkpoint.path, drafter="off", dtype="float32", device="cpu")
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    plain = llm.generate(["the cats", "the"], params)
    drafted = llm.using(drafter="layerskip", skip_layers=[1], k=4).generate(["the cats", "the"], params)
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]
