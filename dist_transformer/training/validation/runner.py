"""A validation: measures and translates each corpus, with one log line, values for the records, sample translations."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from dist_transformer.config.metrics import MEASURES, TRANSLATION_MEASURES
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.data.loader.window_request import PURPOSE_SAMPLES, random_generator
from dist_transformer.distributed.group import Ranks
from dist_transformer.distributed.rounds import WantsStop, WorkFailed, failures_named, in_rounds
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import inputs_of
from dist_transformer.training.memory import explaining_out_of_memory, is_out_of_memory
from dist_transformer.training.run import Run

log = logging.getLogger(__name__)

SAMPLES = 6
"""Sample translations kept at each validation: half of them of the same sentences, half drawn anew."""


@dataclass(frozen=True)
class ValidationSet:
    """A validation corpus, the same on every rank.

    Attributes:
        name: name in records; that of data.validation is "validation", whose measures have no prefix.
        batches: micro-batches of all of its text.
        sources, references: its first pairs, to be translated; without references no translation is scored.
    """

    name: str
    batches: Sequence[MicroBatch]
    sources: Sequence[str] = ()
    references: Sequence[str] = ()

    @property
    def prefix(self) -> str:
        """Prefix of the names of its measures."""
        return "" if self.name == "validation" else f"{self.name}/"


@dataclass(frozen=True)
class Translated:
    """The translations of a set's sources, and their scores with signatures: bleu, chrf, perhaps plugin."""

    translations: Sequence[str]
    scores: dict[str, float | str] = field(default_factory=dict)


Progress = Callable[[], None]
Translate = Callable[[Sequence[ValidationSet], Progress], Iterator[Translated]]
"""Translates each set with the current weights, shared over the ranks, and scores it (collective); the same on every
rank. Progress is called at each advance. Raises Stopped and WorkFailed on every rank, as `in_rounds` does."""


@dataclass(frozen=True)
class Validated:
    """Result of a validation, the same on every rank.

    Attributes:
        values: measures and signatures by name, prefixed with the corpus for all corpora but data.validation.
        samples: name and `sentences` of each translated corpus.
    """

    values: dict[str, float | str]
    samples: list[dict[str, Any]]


class Validator:
    """Measures the validation corpora of a run.

    Args:
        sets: may be empty.
        translate: translates and scores the corpora; None: they are not translated.
    """

    def __init__(self, run: Run, sets: Sequence[ValidationSet], engine: Engine, translate: Translate | None) -> None:
        self._run, self.sets, self._engine = run, sets, engine
        self._translate = translate or (lambda sets, _: iter([Translated(())] * len(sets)))

    def validate(self, step: int, progress: Progress) -> Validated:
        """Measures every corpus with the current weights (collective). Weights and random states do not change. Raises
        Stopped, WorkFailed: on every rank, as in `in_rounds`."""
        measured = [self._measure(each, progress) for each in self.sets]
        values: dict[str, float | str] = {}
        samples = []
        started = time.monotonic()
        translations = self._translate(self.sets, progress)
        for each, (tokens, seconds), translated in zip(self.sets, measured, translations, strict=True):
            found = {**tokens, **translated.scores}
            _log(step, each, found, seconds + time.monotonic() - started)
            values |= {each.prefix + name: value for name, value in found.items()}
            if sentences := self._samples(step, each, translated):
                samples.append({"corpus": each.name, "sentences": sentences})
            started = time.monotonic()
        return Validated(values, samples)

    def dry_run(self, sets: Sequence[ValidationSet], progress: Progress) -> None:
        """Measures and translates `sets` as in a validation, without any result (collective)."""
        for each in sets:
            self._measure(each, progress)
        for _ in self._translate(sets, progress):
            pass

    def _measure(self, each: ValidationSet, progress: Progress) -> tuple[dict[str, float], float]:
        started = time.monotonic()
        tokens = measure_tokens(self._engine, each.batches, self._run.ranks, progress, self._run.wants_stop)
        return tokens, time.monotonic() - started

    def _samples(self, step: int, each: ValidationSet, translated: Translated) -> list[dict[str, Any]]:
        fixed, drawn = sample_lines(len(translated.translations), SAMPLES, self._run.config.run.seed, step)
        return [
            {
                "number": line + 1,
                "fixed": line in fixed,
                "source": each.sources[line],
                "reference": each.references[line],
                "translation": translated.translations[line],
            }
            for line in [*fixed, *drawn]
        ]


def advice_on(failure: WorkFailed) -> str:
    """Returns what makes a validation smaller if a rank was out of memory, to be appended to a message; else ""."""
    ways = "lower data.max_tokens, decoding.max_tokens or validation.beam_size, or set validation.translate=false"
    return f". Where memory was short, {ways}" if is_out_of_memory(failure) else ""


def measure_tokens(
    engine: Engine, batches: Sequence[MicroBatch], ranks: Ranks, progress: Progress, wants_stop: WantsStop
) -> dict[str, float]:
    """Measures all of `batches` without dropout (collective); the same result on every rank: loss, nll and perplexity
    (means over the target tokens, natural logarithm), and the share of them that are the model's likeliest. The model
    receives the preceding reference tokens.

    Rank r takes the micro-batches r, r + W, ...; if W does not divide their number, some ranks compute one more that is
    not counted: ZeRO 3 needs the same number of forward passes on every rank. `progress` is called after each. Raises
    Stopped, WorkFailed: on every rank, as `in_rounds` does. In ZeRO 3, whose passes are collectives, the rank that
    fails raises its error alone.
    """
    sums = torch.zeros(4, dtype=torch.float64)

    def measure(number: int) -> None:
        mine = number * ranks.num_ranks + ranks.rank
        batch = batches[min(mine, len(batches) - 1)]
        told = explaining_out_of_memory("the loss of a validation", ranks.device)
        with failures_named(ranks) if engine.has_full_weights else nullcontext(), told, torch.no_grad():
            sums_of_batch = engine(*inputs_of([batch], ranks.device), True)
            found = torch.stack([value.double() for value in sums_of_batch]).tolist()  # one wait for the device
        if mine < len(batches):
            sums.add_(torch.tensor([*found, batch.shape.target_tokens], dtype=torch.float64))
        progress()

    engine.train(False)
    try:
        in_rounds(ranks, -(-len(batches) // ranks.num_ranks), measure, wants_stop)
    finally:
        engine.train()
    loss_sum, nll_sum, hits, tokens = ranks.all_reduce_sum(sums).tolist()
    nll = nll_sum / tokens
    perplexity = math.exp(min(nll, 700.0))
    return {"loss": loss_sum / tokens, "nll": nll, "perplexity": perplexity, "token_accuracy": hits / tokens}


def sample_lines(num_lines: int, count: int, seed: int, step: int) -> tuple[list[int], list[int]]:
    """Selects `count` different lines, or all: half evenly spread and equal at each step, the others drawn by step."""
    num_fixed = min((count + 1) // 2, num_lines)
    fixed = [(2 * place + 1) * num_lines // (2 * num_fixed) for place in range(num_fixed)]
    others = [line for line in range(num_lines) if line not in fixed]
    num_drawn = min(count // 2, len(others))
    drawn = random_generator(seed, PURPOSE_SAMPLES, step).choice(len(others), num_drawn, replace=False)
    return fixed, sorted(others[place] for place in drawn.tolist())


def _log(step: int, each: ValidationSet, found: dict[str, float | str], seconds: float) -> None:
    name = "" if not each.prefix else f" {each.name}"
    known = {key: MEASURES[key] for key in TRANSLATION_MEASURES if key in found}
    scores = "".join(f"  {measure.name} {found[key]:{measure.form}}" for key, measure in known.items())
    log.info(
        "step %7d  validation%s loss %.4f  nll %.4f  perplexity %.2f  accuracy %.1f%%%s  (%.1f s)",
        step, name, found["loss"], found["nll"], found["perplexity"], 100 * float(found["token_accuracy"]), scores,
        seconds,
    )  # fmt: skip
