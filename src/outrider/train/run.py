"""A whole training run: prompts, answers, vocabulary, steps, drafter folder, card, report.

The same recipe on the same machine gives the same drafter, however often it was interrupted. A folder with a
`config.json` is a finished drafter; its `training` folder holds what is needed to resume. This module prints nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..backends.machine import choose_device, device_name, multiplies_bfloat16, prepare
from ..errors import OutriderError
from ..measure.environment import environment
from ..models.checkpoint import open_checkpoint
from ..models.encoder_decoder import write_encoder_decoder
from ..models.speculators import DTYPES, read_head, target_hash, write_head
from ..models.weights import InMemory, write_folder
from .answers import Answer, AnswerStore, GenerationOptions, TrainingPrompt, answer_requests, prompts_digest
from .batches import Batches, choose_vocabulary, held_out_batches
from .decoder import TargetNet, cut_target, insist_trainable
from .encoder_decoder import EncoderDecoderNet, EncoderDecoderObjective, cut_encoder_decoder
from .encoding import encoded
from .generation import GenerationJob, Progress, Stop, generate_missing
from .loop import ALL, Schedule, TrainingLoop
from .networks import BLOCK, load_start
from .objectives import ModelObjective, Objective, head_objective
from .prompts import read_file, read_prompts
from .recipe import MODEL, ON_DISK, Json, Recipe
from .report import html_report, model_card

_EPOCHS = 3  # when neither steps nor tokens are given
_MODEL_LAYERS = 4
_ENCODER_DECODER_LAYERS = 1  # most of such a model's pass is its output matrix
_MOST_SPECIALS = 64  # some vocabularies reserve hundreds that no text has


def train(recipe: Recipe, progress: Progress | None = None, stop: Stop = lambda: False) -> Json:
    """Make the drafter; returns what the report shows. Raises `Stopped` soon after `stop` returns True."""
    return _TrainingRun(recipe).train(progress, stop)


@dataclass(frozen=True)
class _DrafterBuild:
    """A drafter in training: its objective, and how it is written to its folder."""

    objective: Objective[Any]
    write: Callable[[TrainingLoop], Json]  # returns what the report shows


class _TrainingRun:
    def __init__(self, recipe: Recipe) -> None:
        prepare()
        self.recipe, self.device = recipe, choose_device(recipe.device)
        self.checkpoint = open_checkpoint(recipe.target)
        self.config, self.weights = self.checkpoint.config, self.checkpoint.weights
        if self.config.encoder is None:
            insist_trainable(self.config)
        elif recipe.kind != MODEL:
            raise OutriderError("For an encoder–decoder only a smaller decoder can be trained: choose --kind model.")
        self.identity = target_hash(self.config, self.weights)

    def train(self, progress: Progress | None, stop: Stop) -> Json:
        recipe = self.recipe
        prompts = read_prompts(recipe.prompts, recipe.exclude, recipe.seed)
        self._check_folder()
        answers = self._answers(prompts, progress, stop)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        build = self._build(dtype, answers)
        loop = self._loop(build.objective, answers)
        if recipe.resume:
            loop.resume()
        loop.run(progress, stop)
        result = build.write(loop)
        (recipe.folder / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")
        if recipe.html is not None:
            recipe.html.write_text(html_report(result), encoding="utf-8")
        return result

    def _build(self, dtype: torch.dtype, answers: list[Answer]) -> _DrafterBuild:
        if self.config.encoder is not None:
            dtype = torch.bfloat16 if multiplies_bfloat16() else dtype  # it only gives labels
            return self._build_model(EncoderDecoderNet(self.config, self.weights, dtype, self.device), answers)
        target = TargetNet.load(self.config, self.weights, dtype, self.device)
        return (self._build_model if self.recipe.kind == MODEL else self._build_head)(target, answers)

    def _check_folder(self) -> None:
        """A folder belongs to one run: refuse to mix another into it, or to restart one without --resume."""
        recipe, path = self.recipe, self.recipe.folder / "recipe.json"
        facts = recipe.facts() | {"target_hash": self.identity}
        for name in ("command", "target"):  # paths and names may differ
            facts.pop(name)
        if (recipe.folder / "checkpoint.pt").exists() and not recipe.resume:
            raise OutriderError(
                f"{recipe.out} already holds a training run. Resume it with --resume, choose another --out, or delete "
                f"{recipe.folder}."
            )
        if recipe.resume and path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            differing = sorted(name for name in facts if stored.get(name) != facts[name])
            if differing:
                raise OutriderError(
                    f"The training run in {recipe.out} was started with another {' and '.join(differing)}; give the "
                    "same options to resume it, or another --out."
                )
        recipe.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    def _answers(self, prompts: list[TrainingPrompt], progress: Progress | None, stop: Stop) -> list[Answer]:
        """The target's answers: those on disk, and the missing ones, which are generated."""
        recipe = self.recipe
        batch = recipe.batch or (256 if self.device.type == "cuda" else 8)
        # Sampled answers make a chat drafter robust; a translation has one good text, and sampled ones are noise.
        sampled = GenerationOptions.sampled if self.config.encoder is None else 0.0
        options = GenerationOptions(recipe.answers, recipe.max_tokens, recipe.seed, batch, sampled)
        header: Json = {"target": self.identity, "prompts": prompts_digest(prompts)}
        header |= {"max_tokens": recipe.max_tokens, "seed": recipe.seed, "sampled": options.sampled}
        store = AnswerStore(recipe.answers_file or recipe.folder / "answers.jsonl", header)
        if recipe.answers == ON_DISK:
            store.absorb_parts()
            return store.read()
        requests = answer_requests(prompts, options)
        job = GenerationJob(recipe.target, recipe.dtype, str(self.device), options, requests, recipe.workers)
        return generate_missing(job, store, progress, stop)

    def _build_head(self, target: TargetNet, answers: list[Answer]) -> _DrafterBuild:
        """EAGLE-3, a block drafter, or an early exit's adapter."""
        recipe = self.recipe
        start = None if recipe.start_from is None else read_head(recipe.start_from)
        vocabulary = choose_vocabulary(answers, self.config.vocab_size, recipe.draft_vocab, self._special_ids())
        config = recipe.head_config(self.config, len(vocabulary.ids), self.identity, self.checkpoint.name)
        objective = head_objective(config, vocabulary.ids, target, self.device, recipe.k, recipe.soft, recipe.seed)
        if start is not None:
            load_start(objective.net, config, *start)
        coverage = {"coverage": vocabulary.coverage, "held_coverage": vocabulary.held_coverage}
        facts = {"vocabulary": {"size": len(vocabulary.ids)} | coverage}

        def write(loop: TrainingLoop) -> Json:
            stored = encoded(objective, config, recipe.store, loop.batches.after(0))
            more = facts | {"taps": list(config.taps), "layers": config.layers}
            if recipe.store not in DTYPES:
                more["as_trained"] = loop.evaluations[-1]["kinds"][ALL]["tau"]
                loop.evaluate()  # what is stored
            result = self._result(loop, answers) | more
            measured = replace(config, acceptance=loop.evaluations[-1]["kinds"][ALL]["alpha_by_position"])
            write_head(recipe.out, measured, stored, model_card(result))
            return result

        return _DrafterBuild(objective, write)

    def _special_ids(self) -> list[int]:
        """Ids that end or structure a text: a drafter that cannot propose them never finishes one."""
        tokenizer = self.checkpoint.tokenizer
        special = [i for i in tokenizer.vocabulary.values() if tokenizer.is_special(i)]
        return (special if len(special) <= _MOST_SPECIALS else []) + list(self.config.eos_ids)

    def _build_model(self, target: TargetNet | EncoderDecoderNet, answers: list[Answer]) -> _DrafterBuild:
        """A smaller model with the target's tokenizer, and its encoder if it has one, as a Hugging Face folder."""
        recipe, tokenizer, encoder = self.recipe, self.checkpoint.tokenizer, self.config.encoder is not None
        layers = recipe.layers or min(_ENCODER_DECODER_LAYERS if encoder else _MODEL_LAYERS, self.config.layers)
        cut: Any = cut_encoder_decoder if encoder else cut_target
        net = cut(self.config, self.weights, layers, recipe.train_embedding, self.device)
        facts: Json = {"layers": layers}
        if encoder:
            facts |= self._shorten(net, answers)

        def write(loop: TrainingLoop) -> Json:
            result = self._result(loop, answers) | facts
            form = (tokenizer, DTYPES[recipe.store], model_card(result))
            if encoder:
                drafts = {"target_hash": self.identity, "draft_ids": None if net.ids is None else net.ids.tolist()}
                drafts["acceptance"] = loop.evaluations[-1]["kinds"][ALL]["alpha_by_position"]
                write_encoder_decoder(recipe.out, self.checkpoint.path, net.config, net, *form, drafts)
            else:
                write_folder(recipe.out, net.config, InMemory(net.state_dict()), *form)
            return result

        objective: Any = EncoderDecoderObjective if encoder else ModelObjective
        return _DrafterBuild(objective(net, target, recipe.k, recipe.soft), write)

    def _shorten(self, net: EncoderDecoderNet, answers: list[Answer]) -> Json:
        """Let a model draft frequent tokens only: most of such a model's weights are output rows. For the report."""
        size = self.config.vocab_size
        if not 0 < self.recipe.draft_vocab < size:
            return {}
        short = choose_vocabulary(answers, size, self.recipe.draft_vocab, self._special_ids())
        net.ids = short.ids.to(self.device)
        coverage = {"coverage": short.coverage, "held_coverage": short.held_coverage}
        return {"vocabulary": {"size": len(short.ids)} | coverage}

    def _loop(self, objective: Objective[Any], answers: list[Answer]) -> TrainingLoop:
        recipe, longest = self.recipe, self.config.context_length
        trained = [a for a in answers if not a.held]
        anchors = recipe.anchors if recipe.kind == BLOCK else 0
        batches = Batches(trained, recipe.batch_tokens, longest, recipe.seed, anchors)
        if not batches.items:
            raise OutriderError("No answer has two tokens, so there is nothing to learn; raise --max-tokens.")
        tokens = recipe.tokens or _EPOCHS * sum(a.length for a in batches.items)
        steps = recipe.steps or max(1, -(-tokens // recipe.batch_tokens))
        every = {"save_every": recipe.save_every, "evaluate_every": recipe.evaluate_every}
        schedule = Schedule(steps, recipe.lr, compile=recipe.compile, **every)
        held = held_out_batches(answers, recipe.batch_tokens, longest)
        return TrainingLoop(objective, schedule, batches, held, recipe.folder / "checkpoint.pt")

    def _result(self, loop: TrainingLoop, answers: list[Answer]) -> Json:
        return {
            "kind": self.recipe.kind,
            "target": {"name": self.checkpoint.name, "hash": self.identity},
            "recipe": self.recipe.facts(),
            "data": [_file_facts(path) for path in self.recipe.prompts],
            "answers": len(answers),
            "answer_tokens": sum(len(a.answer) for a in answers),
            "held_answers": sum(a.held for a in answers),
            "steps": loop.step,
            "tokens": loop.tokens,
            "seconds": loop.seconds,
            "tok_s": loop.tokens / max(loop.seconds, 1e-9),
            "parameters": sum(p.numel() for p in loop.parameters),
            "device": device_name(loop.device) if loop.device.type == "cuda" else "cpu",
            "losses": loop.losses,
            "evaluations": loop.evaluations,
            "environment": environment(),
        }


def _file_facts(path: Path) -> Json:
    sha = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return {"file": path.name, "prompts": len(read_file(path)), "sha256": sha}
