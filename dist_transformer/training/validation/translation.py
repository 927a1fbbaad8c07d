"""Validation corpora of a run: reading and tokenizing, translation with the current weights, scores."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from dist_transformer.config.data_schema import CorpusConfig
from dist_transformer.config.schema import Config, DecodingConfig
from dist_transformer.data.loader.loader import MicroBatch, micro_batches
from dist_transformer.data.loader.text_rows import token_column
from dist_transformer.data.loader.token_rows import TokenRows
from dist_transformer.data.loader.window import WindowBuilder
from dist_transformer.data.prepare.scan import at_commits, load_tokenizer
from dist_transformer.data.sources.cached_text import Pairs, kept_pairs, texts_to_keep
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.search import TorchSearcher
from dist_transformer.decoding.translate import cut_lines, first_batch, translate_together
from dist_transformer.distributed.rank_zero import run_on_rank_zero
from dist_transformer.distributed.rounds import Stopped, WantsStop, WorkFailed, failures_named, in_rounds
from dist_transformer.errors import DataError, UserError
from dist_transformer.interop.model_folder import empty_model
from dist_transformer.model.transformer import Transformer
from dist_transformer.plugins import ScoreTranslations, find, measure_of
from dist_transformer.run.resume_checks import METRIC
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.memory import as_text, begin_peak, explaining_out_of_memory, give_back, peak
from dist_transformer.training.run import Run
from dist_transformer.training.validation.runner import (
    Progress,
    Translate,
    Translated,
    ValidationSet,
    Validator,
    advice_on,
)

log = logging.getLogger(__name__)

CHUNK_PAIRS = 4096
"""Number of pairs sorted by length and cut into micro-batches together, like a row group of a prepared corpus."""


def open_validator(run: Run, engine: Engine) -> Validator:
    """Reads the corpora (collective). Raises UserError: on every rank: a corpus cannot be read, a line of it is too
    long, or the plug-in fails."""
    config, data = run.config, run.data
    run.watchdog.progress("reading the validation corpus")
    tokenizer = load_tokenizer(data.folder, data.manifest.tokenizer)
    kept = texts_to_keep(at_commits(config, data.manifest.commits))
    texts = {key: _read(run, tokenizer, key, *text) for key, text in kept.items()}
    sets = []
    if config.data.validation is not None and (batches := _cut(run, data.validation(), "data.validation")):
        # Measured on the prepared corpus, translated from the text.
        sources, references = texts.get("validation", ([], []))
        if (most := config.model.max_positions) is not None:
            refuse_longer([len(ids) for ids in tokenizer.encode_source(sources)], most, "data.validation")
        sets.append(ValidationSet("validation", batches, sources, references))
    for name in config.data.more_validation:
        place, text = f"data.more_validation.{name}", texts[f"more_validation.{name}"]
        every_pair = text_batches(data.builder, tokenizer, *text, config.model.max_positions, place)
        settings, batches = config.validation, _cut(run, every_pair, place)
        sources, references = (side[: settings.max_sentences] if settings.translate else [] for side in text)
        sets.append(ValidationSet(name, batches, sources, references))
    translate = _translator(run, tokenizer, engine) if config.validation.translate and sets else None
    return Validator(run, sets, engine, translate)


def dry_run_of_validation(run: Run, validator: Validator) -> None:
    """Measures each corpus's largest micro-batches, and translates its longest lines (collective); records nothing.
    Raises UserError: a rank is out of memory; raised on every rank, as WorkFailed is for any other failure. In ZeRO 3,
    whose measuring consists of collectives, on that rank alone."""
    tokenizer, search = load_tokenizer(run.data.folder, run.data.manifest.tokenizer), _search(run.config)
    doing, started, device = "the dry run of the largest batches of a validation", time.monotonic(), run.ranks.device
    sets = [
        ValidationSet(each.name, _largest(each.batches), first_batch(tokenizer, each.sources, search))
        for each in validator.sets
    ]
    begin_peak(device)
    try:
        validator.dry_run(sets, run.doing(doing))
    except Stopped:
        return  # raised again at the first batch
    except WorkFailed as failure:
        if not (advice := advice_on(failure)):
            raise
        raise UserError(f"{doing} failed: {failure}{advice}").agreed() from failure
    log.info("dry run    of a validation: %s at most, %.1f s", as_text(peak(device)), time.monotonic() - started)
    give_back(device)


def _largest(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Returns the batches with the most tokens, padding included, and the longest side (a pair above the budget)."""
    longest = max(batches, key=lambda batch: max(batch.shape.source_length, batch.shape.target_length))
    return [max(batches, key=lambda batch: batch.shape.padded_tokens), longest]


def _cut(run: Run, batches: Iterable[MicroBatch], place: str) -> list[MicroBatch]:
    """Collects the batches, each of which is progress."""
    found = []
    for batch in batches:
        run.watchdog.progress(f"cutting {place} into batches")
        found.append(batch)
    return found


def text_batches(
    builder: WindowBuilder,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    max_positions: int | None,
    name: str,
) -> Iterator[MicroBatch]:
    """Yields every pair once, tokenized in memory chunk by chunk, in micro-batches of similar lengths; a pair above the
    budget has its own. Raises DataError: a side is longer than `max_positions`; the message names the line of the corpus
    `name`."""
    for first in range(0, len(sources), CHUNK_PAIRS):
        chunk = slice(first, first + CHUNK_PAIRS)
        encoded = tokenizer.encode_source(sources[chunk]), tokenizer.encode_target(targets[chunk])
        for side in encoded:
            refuse_longer([len(ids) for ids in side], max_positions, name, first)
        source, target = map(token_column, encoded)
        rows = TokenRows(np.arange(first, first + len(source.lengths)), source, target, Counter())
        yield from micro_batches(builder.build_rows(rows), 0, tokenizer.bos_id)


def refuse_longer(lengths: Sequence[int], max_positions: int | None, name: str, num_before: int = 0) -> None:
    """Raises a DataError for a line that is longer than a model with learned positions can take."""
    for line, length in enumerate(lengths, start=num_before + 1):
        if max_positions is not None and length > max_positions:
            raise DataError(
                f"{name}, line {line}: {length} tokens, but the model learns only {max_positions} positions, and no pair of it "
                "is left out: raise model.max_positions (of a new run), cut the line into shorter sentences, or remove it"
            )


def _read(run: Run, tokenizer: Tokenizer, key: str, corpus: CorpusConfig, most: int | None) -> Pairs:
    """Reads the text on rank 0, for all ranks (collective). DataError: also if a line cannot be cut as the search needs it."""

    def read() -> Pairs:
        try:
            source, target = kept_pairs(corpus, run.config.data, most, run.data.folder)
            if run.config.validation.translate:
                lines = [(line, "") for line in source[: run.config.validation.max_sentences]]
                cut_lines(tokenizer, lines, 0, None, _search(run.config))
            return source, target
        except DataError as error:
            part = "translations: validation.translate=false" if key == "validation" else "this corpus"
            raise DataError(f"data.{key}: {error} (put it right, or continue without {part})") from error

    return run_on_rank_zero(run.ranks, read, run.doing(f"reading data.{key}"))


def _translator(run: Run, tokenizer: Tokenizer, engine: Engine) -> Translate:
    from dist_transformer.decoding.metrics import corpus_scores

    config, ranks, search, own_signature = run.config, run.ranks, _search(run.config), run.data.recipe()[METRIC]
    measures: dict[str, ScoreTranslations] = {}  # loaded on rank 0 alone, before the first step
    if (given := config.validation.plugin) is not None:
        doing = run.doing("loading the plug-in of the validation")
        run_on_rank_zero(ranks, lambda: measures.update(plugin=measure_of(find(METRIC, given))), doing)

    def scores(each: ValidationSet, translations: Sequence[str]) -> dict[str, float | str]:
        corpus = config.data.more_validation.get(each.name) or config.data.validation or CorpusConfig()
        with failures_named(ranks):
            found = corpus_scores(translations, [each.references], config.data.languages_of(corpus)[1])
            del found["exact_match"]
            found |= {f"{key}_signature": own_signature for key in measures}
            return found | {key: of(translations, each.references, each.sources) for key, of in measures.items()}

    def translate(sets: Sequence[ValidationSet], progress: Progress) -> Iterator[Translated]:
        with _full_model(run, engine) as model:
            searcher = TorchSearcher([model], tokenizer.special, search, ranks.device)
            searcher.each_token = _Look(progress, run.wants_stop)
            for each in sets:
                with engine.objective.autocast(ranks.device):
                    lines = translate_together(
                        searcher, tokenizer, each.sources, search, ranks, progress, run.wants_stop
                    )
                scored: dict[str, float | str] = {}
                if each.references:
                    scored = run_on_rank_zero(ranks, partial(scores, each, lines), progress, wants_stop=run.wants_stop)
                yield Translated(lines, scored)

    return translate


def _search(config: Config) -> DecodingConfig:
    """Returns the settings of the search: the best translation of each line; long lines are split and never refused."""
    own = {"beam_size": config.validation.beam_size, "too_long": "split"}
    return DecodingConfig(**{**config.decoding.model_dump(), **own})


LOOK_SECONDS = 0.5
"""Interval at which a search checks for a stop, each time by a look at a file on a shared disk."""


class _Look:
    """Callback before each token of a search: reports progress, and raises Stopped if a stop is wanted."""

    def __init__(self, progress: Progress, wants_stop: WantsStop) -> None:
        self._progress, self._wants_stop, self._next = progress, wants_stop, 0.0

    def __call__(self) -> None:
        self._progress()
        if time.monotonic() >= self._next:
            if self._wants_stop():
                raise Stopped
            self._next = time.monotonic() + LOOK_SECONDS


WHOLE_COPY = "the copy of the whole model that a validation translates with (validation.translate=false needs none)"


@contextmanager
def _full_model(run: Run, engine: Engine) -> Iterator[Transformer]:
    """Yields the model in eval mode with all weights on every rank, to be called without collectives (collective).
    WorkFailed on every rank if one has no memory for the copy."""
    if engine.has_full_weights:
        engine.train(False)
        try:
            yield engine.objective.model
        finally:
            engine.train()
        return
    ranks, copies = run.ranks, list[Transformer]()

    def take_memory(number: int) -> None:
        with failures_named(ranks), explaining_out_of_memory(WHOLE_COPY, ranks.device):
            model = empty_model(run.config.model, run.data.manifest)
            model = model.half() if run.training.precision == "fp16" else model
            copies.append(model.to_empty(device=ranks.device).eval().requires_grad_(False))

    in_rounds(ranks, 1, take_memory, lambda: False)  # all ranks agree before any of them waits for the weights
    (model,) = copies
    engine.copy_weights(dict(model.named_parameters()))
    yield model
