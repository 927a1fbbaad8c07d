"""What must hold between settings, and on disk. Each problem is (key path, message); the caller adds file and line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dist_transformer.config.marks import KeyPath
from dist_transformer.config.models import CorpusConfig, DataConfig

Problem = tuple[KeyPath, str]


def cross_problems(sections: dict[str, Any]) -> list[Problem]:
    """Problems between settings. A check whose sections did not validate is left out: they have their own problems."""
    problems: list[Problem] = []
    for needed, check in _CHECKS:
        if all(name in sections for name in needed):
            problems += check(*(sections[name] for name in needed))
    return problems


def file_problems(data: DataConfig) -> list[Problem]:
    """Local files that the corpora name and that are not there."""
    problems: list[Problem] = []
    for name in ("train", "validation", "test"):
        corpus = getattr(data, name)
        for key in ("source", "target", "path"):
            if corpus is not None and (given := getattr(corpus, key)) and not _exists(data, given):
                where = Path(data.root) / given
                problems.append(
                    (("data", name, key), f"data.{name}.{key}: no such file: {where} (data.root is {data.root!r})")
                )
    return problems


def _exists(data: DataConfig, given: str) -> bool:
    return "://" in given or (Path(data.root) / given).is_file()


def _check_model(model: Any) -> Iterator[Problem]:
    if model.d_model % model.num_heads:
        yield ("model", "num_heads"), f"model.num_heads: {model.num_heads} heads do not divide d_model {model.d_model}"
    if model.d_model % 2:
        yield ("model", "d_model"), f"model.d_model: sinusoidal positions (3.5) need an even width, got {model.d_model}"
    if model.shared_embeddings and not model.tied_output:
        yield (
            ("model", "tied_output"),
            "model.tied_output: false needs model.shared_embeddings: false (3.4 shares all three matrices)",
        )


def _check_vocabulary(tokenizer: Any, model: Any) -> Iterator[Problem]:
    if model.shared_embeddings and not tokenizer.shared:
        yield (
            ("model", "shared_embeddings"),
            "model.shared_embeddings: true needs tokenizer.shared: true; set both or neither",
        )
    if tokenizer.target_model and tokenizer.shared:
        yield (
            ("tokenizer", "target_model"),
            "tokenizer.target_model: is for separate vocabularies; drop it or set tokenizer.shared: false",
        )
    if not tokenizer.shared and bool(tokenizer.source_model) != bool(tokenizer.target_model):
        yield (
            ("tokenizer", "source_model"),
            "tokenizer: separate vocabularies need both source_model and target_model, or neither",
        )


def _check_schedule(optimizer: Any, schedule: Any, training: Any) -> Iterator[Problem]:
    if training.max_steps is None and training.max_epochs is None:
        yield ("training", "max_steps"), "training: give max_steps or max_epochs, else the run never ends"
    if schedule.name != "inverse_sqrt" and optimizer.learning_rate is None:
        yield (
            ("schedule", "name"),
            f"schedule.name: {schedule.name} needs optimizer.learning_rate (only inverse_sqrt has the paper's)",
        )
    if training.max_steps is not None and schedule.warmup_steps > training.max_steps:
        yield (
            ("schedule", "warmup_steps"),
            f"schedule.warmup_steps: {schedule.warmup_steps} is above training.max_steps {training.max_steps}",
        )
    if schedule.name in ("cosine", "linear") and training.max_steps is None:
        yield ("schedule", "name"), f"schedule.name: {schedule.name} ends at training.max_steps, which is not given"


def _check_precision(training: Any) -> Iterator[Problem]:
    if training.precision == "fp16" and training.zero_stage == 0:
        yield (
            ("training", "zero_stage"),
            "training.zero_stage: 0 cannot be used with fp16 (DeepSpeed does not scale the loss there); use 1, 2 or 3",
        )
    if training.initial_loss_scale & (training.initial_loss_scale - 1):
        yield (
            ("training", "initial_loss_scale"),
            f"training.initial_loss_scale: expected a power of 2, got {training.initial_loss_scale}",
        )


def _check_lanes(data: Any, slurm: Any) -> Iterator[Problem]:
    num_ranks = slurm.nodes * slurm.ranks_per_node
    if num_ranks > data.lanes:
        yield (
            ("slurm", "nodes"),
            f"slurm: {slurm.nodes} nodes x {slurm.ranks_per_node} ranks = {num_ranks} ranks, more than data.lanes "
            f"{data.lanes}; a rank needs a lane of its own",
        )


def _check_batches(data: Any) -> Iterator[Problem]:
    longest = 2 * data.filters.max_tokens
    if longest > data.max_tokens:
        yield (
            ("data", "max_tokens"),
            f"data.max_tokens: {data.max_tokens} cannot hold one pair of two sides of data.filters.max_tokens "
            f"{data.filters.max_tokens}; needs at least {longest}",
        )


def _check_corpora(data: DataConfig) -> Iterator[Problem]:
    for name in ("train", "validation", "test"):
        corpus: CorpusConfig | None = getattr(data, name)
        if corpus is None:
            continue
        kinds = [k for k in ("path", "hub", "demo") if getattr(corpus, k)]
        kinds += ["source+target"] if corpus.source or corpus.target else []
        if len(kinds) != 1:
            got = " and ".join(kinds) or "nothing"
            yield ("data", name), f"data.{name}: expected one of source+target, path, hub, demo; got {got}"
        elif "source+target" in kinds and not (corpus.source and corpus.target):
            missing = "target" if corpus.source else "source"
            yield ("data", name), f"data.{name}: aligned text needs both files; {missing} is not given"


_CHECKS: list[tuple[tuple[str, ...], Callable[..., Iterator[Problem]]]] = [
    (("model",), _check_model),
    (("tokenizer", "model"), _check_vocabulary),
    (("optimizer", "schedule", "training"), _check_schedule),
    (("training",), _check_precision),
    (("data", "slurm"), _check_lanes),
    (("data",), _check_batches),
    (("data",), _check_corpora),
]
