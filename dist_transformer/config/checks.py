"""Checks between settings, and of files on disk. Each problem is (key path, message); the caller adds file and line."""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from dist_transformer.config.credentials import holds_secret, without_credentials
from dist_transformer.config.data_checks import (
    Problem,
    check_corpora,
    check_mixture,
    check_more_validation,
    check_sampling,
    check_training_corpora,
    corpus_file_problems,
)
from dist_transformer.config.data_schema import DataConfig, TokenizerConfig
from dist_transformer.config.metrics import corpus_and_measure
from dist_transformer.config.model_checks import check_decoding, check_model, check_positions, check_vocabulary
from dist_transformer.config.parameter_names import check_patterns
from dist_transformer.config.secret_checks import secret_problems
from dist_transformer.config.validation_checks import check_validation

RESERVED_NAMES = ("prepared", "mlartifacts", "mlflow.db")
"""Names of the other entries of run.root, beside the run folders."""

_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def cross_problems(sections: dict[str, Any]) -> list[Problem]:
    """Returns the problems between settings. Skips checks of invalid sections, which have problems of their own."""
    problems: list[Problem] = [*secret_problems(sections)]
    for needed, check in _CHECKS:
        if all(name in sections for name in needed):
            problems += check(*(sections[name] for name in needed))
    return problems


def file_problems(data: DataConfig | None, tokenizer: TokenizerConfig | None) -> list[Problem]:
    """Returns a problem for each missing local file of the corpora and the tokenizer."""
    return [*(corpus_file_problems(data) if data else ()), *(_model_file_problems(tokenizer) if tokenizer else ())]


def run_name_problems(name: str) -> Iterator[Problem]:
    """Checks the name of a run, which becomes a folder, a job, an argument of commands and a part of file names."""
    if not _RUN_NAME.fullmatch(name):
        yield (
            ("run", "name"),
            f"run.name: {name!r}: expected letters, digits, '.', '_' and '-', and no '-' or '.' in front: "
            "it names a folder, the job and files; rename the run",
        )
    elif name in RESERVED_NAMES:
        yield (
            ("run", "name"),
            f"run.name: {name!r}: is kept in run.root for what all runs share ({', '.join(RESERVED_NAMES)}); "
            "rename the run",
        )


def _model_file_problems(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    for key in ("source_model", "target_model"):
        given = getattr(tokenizer, key)
        if given is not None and not os.path.isfile(given):
            yield (
                ("tokenizer", key),
                f"tokenizer.{key}: no such file: {os.path.abspath(given)}; expected a sentencepiece model (.model)",
            )


def _check_run(run: Any) -> Iterator[Problem]:
    yield from run_name_problems(run.name)


_TRACKING_ADDRESS = r"(https?|sqlite|(postgresql|mysql|mssql)(\+\w+)?)://.|databricks\b"


def _check_tracking(tracking: Any) -> Iterator[Problem]:
    # Credentials are removed from the records of a run: they must not be in the setting, as a resume would miss them.
    if tracking.uri and (without_credentials(tracking.uri) != tracking.uri or holds_secret(tracking.uri)):
        yield (
            ("tracking", "uri"),
            "tracking.uri: holds a user or password, and would be written into the run folder; for a server, `export` "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; for a database, put a tracking server in front of "
            "it, or `export` the whole address as MLFLOW_TRACKING_URI and remove it here",
        )
    elif tracking.uri and not re.match(_TRACKING_ADDRESS, tracking.uri):
        yield (
            ("tracking", "uri"),
            f"tracking.uri: expected http://HOST:PORT, https://HOST, sqlite:////ABSOLUTE/PATH.db or another database's "
            f"address (postgresql+psycopg2://...), or databricks; got {tracking.uri}",
        )
    if tracking.alias is not None and not re.fullmatch(r"(?!(latest|v\d+)$)[\w-]+", tracking.alias, re.IGNORECASE):
        yield (
            ("tracking", "alias"),
            f"tracking.alias: {tracking.alias!r}: expected letters, digits, '_' and '-'; latest, v1, v2 ... are names that "
            "MLflow keeps for itself; champion?",
        )
    if tracking.alias is not None and tracking.register_as is None:
        yield (
            ("tracking", "alias"),
            "tracking.alias: is an alias of a registered model; give its name in tracking.register_as, or remove the alias",
        )


def _check_checkpoints(checkpoints: Any, training: Any, validation: Any, data: Any) -> Iterator[Problem]:
    if checkpoints.average_last > checkpoints.keep_last:
        yield (
            ("checkpoints", "average_last"),
            f"checkpoints.average_last: {checkpoints.average_last} is above checkpoints.keep_last "
            f"{checkpoints.keep_last}: the others are gone by then; keep as many as are averaged",
        )

    yield from _final_model_problems(checkpoints, training, validation, data)


def _final_model_problems(checkpoints: Any, training: Any, validation: Any, data: Any) -> Iterator[Problem]:
    key = ("checkpoints", "final_model")
    if checkpoints.final_model == "ema" and training.ema_decay is None:
        yield key, "checkpoints.final_model: ema needs training.ema_decay (0.9999 is usual): set both or neither"
    if checkpoints.final_model == "average_best" and not checkpoints.keep_best:
        yield key, "checkpoints.final_model: average_best needs checkpoints.keep_best: so many are averaged"
    if not checkpoints.keep_best:
        return
    if corpus_and_measure(validation.metric)[0] is None and data.validation is None:
        yield (
            ("checkpoints", "keep_best"),
            f"checkpoints.keep_best: needs data.validation: the best are those of the best {validation.metric}",
        )
    if checkpoints.every_steps % validation.every_steps:
        yield (
            ("checkpoints", "keep_best"),
            f"checkpoints.keep_best: checkpoints.every_steps {checkpoints.every_steps} is no multiple of "
            f"validation.every_steps {validation.every_steps}: a checkpoint is judged by the validation at its step",
        )


def _check_keep_every(checkpoints: Any) -> Iterator[Problem]:
    if checkpoints.keep_every_steps and checkpoints.keep_every_steps % checkpoints.every_steps:
        yield (
            ("checkpoints", "keep_every_steps"),
            f"checkpoints.keep_every_steps: {checkpoints.keep_every_steps} is no multiple of checkpoints.every_steps "
            f"{checkpoints.every_steps}: at other steps there is no checkpoint to keep",
        )


def _check_schedule(optimizer: Any, schedule: Any, training: Any) -> Iterator[Problem]:
    ends = (training.max_steps, training.max_epochs, training.max_target_tokens)
    if all(end is None for end in ends):
        yield (
            ("training", "max_steps"),
            "training: give max_steps, max_epochs or max_target_tokens, else the run never ends",
        )
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
    if training.precision in ("fp16", "auto") and training.zero_stage == 0:
        is_given = training.precision == "fp16"
        which = "fp16" if is_given else "training.precision: auto, which is fp16 on GPUs"
        yield (
            ("training", "zero_stage"),
            f"training.zero_stage: 0 cannot be used with {which} (DeepSpeed does not scale the loss there); use 1, 2 or 3"
            f"{'' if is_given else ', or fp32 or bf16'}",
        )
    if training.compile_layers and training.zero_stage == 3:
        yield (
            ("training", "compile_layers"),
            "training.compile_layers: true needs training.zero_stage 0, 1 or 2, got 3, which gathers weights within the layers",
        )
    if training.same_bits:
        yield from _check_same_bits(training)
    needed_stage = {"none": 0, "optimizer": 1, "optimizer_and_parameters": 3}[training.offload]
    if training.zero_stage < needed_stage:
        yield (
            ("training", "offload"),
            f"training.offload: {training.offload} needs training.zero_stage {needed_stage} or above, got "
            f"{training.zero_stage}: only what ZeRO shards can lie in the CPU's memory",
        )


def _check_same_bits(training: Any) -> Iterator[Problem]:
    needed: dict[str, tuple[tuple[Any, ...], str]] = {
        "precision": (("fp32",), "products of 16-bit types depend on the ZeRO stage"),
        "zero_stage": ((0, 1, 2), "DeepSpeed sums the gradients of stage 3"),
        "offload": (("none",), "DeepSpeed sums the gradients of offload"),
        "communication_dtype": (("auto", "fp32"), "gradients are sent in fp64"),
        "lanes_per_pass": ((1,), "lanes in one pass share its dropout masks and roundings"),
        "compile_layers": ((False,), "kernels are made for the shapes that a rank meets first"),
    }
    for key, (values, reason) in needed.items():
        if (given := getattr(training, key)) not in values:
            allowed = " or ".join(str(value).lower() for value in values)
            yield (
                ("training", key),
                f"training.same_bits: true needs training.{key}: {allowed}, got {str(given).lower()}: {reason}",
            )


def _check_divergence(training: Any, divergence: Any) -> Iterator[Problem]:
    if divergence.policy == "switch_to_bf16" and training.precision == "fp32":
        yield (
            ("divergence", "policy"),
            "divergence.policy: switch_to_bf16 is for training.precision: fp16, got fp32, which is more exact; use "
            "lower_learning_rate or stop",
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
    if data.max_tokens != "auto" and longest > data.max_tokens:
        yield (
            ("data", "max_tokens"),
            f"data.max_tokens: {data.max_tokens} cannot hold one pair of two sides of data.filters.max_tokens "
            f"{data.filters.max_tokens}; needs at least {longest}",
        )


_CHECKS: list[tuple[tuple[str, ...], Callable[..., Iterator[Problem]]]] = [
    (("run",), _check_run),
    (("model",), check_model),
    (("data", "model"), check_positions),
    (("tokenizer", "model"), check_vocabulary),
    (("decoding",), check_decoding),
    (("optimizer", "schedule", "training"), _check_schedule),
    (("training",), _check_precision),
    (("training", "optimizer", "model"), check_patterns),
    (("data", "slurm"), _check_lanes),
    (("data",), _check_batches),
    (("data",), check_training_corpora),
    (("data",), check_corpora),
    (("data",), check_mixture),
    (("data", "tokenizer"), check_sampling),
    (("checkpoints", "training", "validation", "data"), _check_checkpoints),
    (("checkpoints",), _check_keep_every),
    (("data",), check_more_validation),
    (("validation", "data"), check_validation),
    (("training", "divergence"), _check_divergence),
    (("tracking",), _check_tracking),
]
