"""Checks between settings, and of files on disk. Each problem begins with its key; the caller adds file and line."""

import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from dist_transformer.config import data_checks
from dist_transformer.config.credentials import holds_secret, secret_problems, without_credentials
from dist_transformer.config.data_schema import DataConfig, TokenizerConfig
from dist_transformer.config.metrics import TOKEN_MEASURES, TRANSLATION_MEASURES, corpus_and_measure
from dist_transformer.config.parameter_names import check_patterns
from dist_transformer.config.schema import ENDLESS, ValidationConfig

RESERVED_NAMES = ("prepared", "mlartifacts", "mlflow.db")
"""Names of the other entries of run.root, beside the run folders."""

_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def cross_problems(sections: dict[str, Any]) -> list[str]:
    """Returns the problems between settings. A check takes the sections that its parameters name; those of invalid sections,
    which have problems of their own, are skipped."""
    problems = [problem for _, problem in secret_problems(sections)]
    for check in _CHECKS:
        needed = inspect.signature(check).parameters
        if needed.keys() <= sections.keys():
            problems += check(**{name: sections[name] for name in needed})
    return problems


def file_problems(
    data: DataConfig | None, tokenizer: TokenizerConfig | None, is_made: Callable[[str], bool] = lambda _: False
) -> list[str]:
    """Returns a problem for each missing local file of the corpora and the tokenizer that nothing makes (`is_made`)."""
    of_data = data_checks.corpus_file_problems(data, is_made) if data else ()
    return [*of_data, *(_model_file_problems(tokenizer, is_made) if tokenizer else ())]


def run_name_problems(name: str) -> Iterator[str]:
    """Checks the name of a run, which becomes a folder, a job, an argument of commands and a part of file names."""
    if not _RUN_NAME.fullmatch(name):
        yield (
            f"run.name: {name!r}: expected letters, digits, '.', '_' and '-', and no '-' or '.' in front: "
            "it names a folder, the job and files; rename the run"
        )
    elif name in RESERVED_NAMES:
        yield (
            f"run.name: {name!r}: is kept in run.root for what all runs share ({', '.join(RESERVED_NAMES)}); "
            "rename the run"
        )


def _check_paths(run: Any, data: DataConfig) -> Iterator[str]:
    for key, given in (("run.root", run.root), ("data.prepared", data.prepared or "/")):
        if (path := os.path.abspath(given)) != path.encode("utf-8", "ignore").decode():
            yield f"{key}: {path!r}: expected a path in UTF-8, got other bytes in it: rename it, or set LC_ALL=C.UTF-8"


def _model_file_problems(tokenizer: TokenizerConfig, is_made: Callable[[str], bool]) -> Iterator[str]:
    for key in ("source_model", "target_model"):
        given = getattr(tokenizer, key)
        if given is not None and not os.path.isfile(given) and not is_made(given):
            what = "is a folder" if os.path.isdir(given) else "no such file"
            yield f"tokenizer.{key}: {what}: {os.path.abspath(given)}; expected a sentencepiece model: RUN/model/source.model"


_TRACKING_ADDRESS = r"(https?|sqlite|(postgresql|mysql|mssql)(\+\w+)?)://.|databricks\b"


def _check_tracking(tracking: Any) -> Iterator[str]:
    # Credentials are removed from the records of a run: they must not be in the setting, as a resume would miss them.
    if tracking.uri and (without_credentials(tracking.uri) != tracking.uri or holds_secret(tracking.uri)):
        yield (
            "tracking.uri: holds a user or password, and would be written into the run folder; for a server, `export` "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; for a database, put a tracking server in front of "
            "it, or `export` the whole address as MLFLOW_TRACKING_URI and remove it here"
        )
    elif tracking.uri and not re.match(_TRACKING_ADDRESS, tracking.uri):
        yield (
            f"tracking.uri: expected http://HOST:PORT, https://HOST, sqlite:////ABSOLUTE/PATH.db or another database's "
            f"address (postgresql+psycopg2://...), or databricks; got {tracking.uri}"
        )
    if tracking.alias is not None and not re.fullmatch(r"(?!(latest|v\d+)$)[\w-]+", tracking.alias, re.IGNORECASE):
        yield (
            f"tracking.alias: {tracking.alias!r}: expected letters, digits, '_' and '-'; latest, v1, v2 ... are names that "
            "MLflow keeps for itself; champion?"
        )
    if tracking.alias is not None and tracking.register_as is None:
        yield "tracking.alias: is one of a registered model; give its name in tracking.register_as, or remove the alias"


def _check_checkpoints(checkpoints: Any, training: Any, validation: Any, data: Any) -> Iterator[str]:
    if checkpoints.keep_every_steps and checkpoints.keep_every_steps % checkpoints.every_steps:
        yield (
            f"checkpoints.keep_every_steps: {checkpoints.keep_every_steps} is no multiple of checkpoints.every_steps "
            f"{checkpoints.every_steps}: at other steps there is no checkpoint to keep"
        )
    if checkpoints.final_model == "average_last" and checkpoints.average_last > checkpoints.keep_last:
        yield (
            f"checkpoints.average_last: {checkpoints.average_last} is above checkpoints.keep_last "
            f"{checkpoints.keep_last}: the others are gone by then; keep as many as are averaged"
        )
    if checkpoints.final_model == "ema" and training.ema_decay is None:
        yield "checkpoints.final_model: ema needs training.ema_decay (0.9999 is usual): set both or neither"
    if training.ema_decay is not None and training.ema_decay < 0.5:
        yield (
            f"training.ema_decay: {training.ema_decay} is the share of the average that stays; other programs give that of the "
            f"new weights: write 1 - {training.ema_decay}, which is {1 - training.ema_decay:.6g}"
        )
    if checkpoints.final_model == "average_best" and not checkpoints.keep_best:
        yield "checkpoints.final_model: average_best needs checkpoints.keep_best: so many are averaged"
    if not checkpoints.keep_best:
        return
    if corpus_and_measure(validation.metric)[0] is None and data.validation is None:
        yield f"checkpoints.keep_best: needs data.validation: the best are those of the best {validation.metric}"
    if checkpoints.every_steps % validation.every_steps:
        yield (
            f"checkpoints.keep_best: checkpoints.every_steps {checkpoints.every_steps} is no multiple of "
            f"validation.every_steps {validation.every_steps}: a checkpoint is judged by the validation at its step; "
            "give a validation.every_steps that divides it"
        )


def _check_schedule(optimizer: Any, schedule: Any, training: Any) -> Iterator[str]:
    if training.max_steps is None and training.max_epochs is None:
        yield "training.max_steps: give max_steps or max_epochs, else the run never ends"
    if schedule.name != "inverse_sqrt" and optimizer.learning_rate is None:
        yield f"schedule.name: {schedule.name} needs optimizer.learning_rate (only inverse_sqrt has the paper's)"
    if training.max_steps is not None and schedule.warmup_steps > training.max_steps:
        yield f"schedule.warmup_steps: {schedule.warmup_steps} is above training.max_steps {training.max_steps}"
    if schedule.name not in ENDLESS and training.max_steps is None:
        yield (
            f"schedule.name: {schedule.name} ends at training.max_steps, which is not given; give it, also beside max_epochs "
            "(100000 to a run that a version before began without it)"
        )


def _check_matrices(optimizer: Any, training: Any, model: Any) -> Iterator[str]:
    """Muon orthogonalizes whole matrices of this program's layers."""
    reasons = {
        "training.zero_stage: 3, which gathers weights alone; use 0, 1 or 2": training.zero_stage == 3,
        f"training.offload: {training.offload}, where DeepSpeed updates; use none": training.offload != "none",
        "training.same_bits: true, as its products depend on threads; set it to false": training.same_bits,
        f"model.plugin: {model.plugin}, whose matrices are not known; use adam": model.plugin is not None,
    }
    for reason in (reason for reason, is_so in reasons.items() if is_so and optimizer.matrices == "muon"):
        yield f"optimizer.matrices: muon cannot be used with {reason}"


def _check_step(training: Any) -> Iterator[str]:
    if training.precision in ("fp16", "auto") and training.zero_stage == 0:
        is_given = training.precision == "fp16"
        which = "fp16" if is_given else "training.precision: auto, which is fp16 on GPUs"
        yield (
            f"training.zero_stage: 0 cannot be used with {which} (DeepSpeed does not scale the loss there); use 1, 2 or 3"
            f"{'' if is_given else ', or fp32 or bf16'}"
        )
    if training.audit_share and (training.zero_stage == 3 or training.offload != "none"):
        yield (
            "training.audit_share: needs training.zero_stage 0, 1 or 2 and training.offload: none, where a rank can compute a "
            f"micro-batch alone; got stage {training.zero_stage} and offload {training.offload}. Set it to 0, or change these"
        )
    if training.same_bits:
        yield from _check_same_bits(training)
    needed_stage = {"none": 0, "optimizer": 1, "optimizer_and_parameters": 3}[training.offload]
    if training.zero_stage < needed_stage:
        yield (
            f"training.offload: {training.offload} needs training.zero_stage {needed_stage} or above, got "
            f"{training.zero_stage}: only what ZeRO shards can lie in the CPU's memory"
        )


def _check_same_bits(training: Any) -> Iterator[str]:
    needed: dict[str, tuple[tuple[Any, ...], str]] = {
        "precision": (("fp32",), "products of 16-bit types depend on the ZeRO stage"),
        "zero_stage": ((0, 1, 2), "DeepSpeed sums the gradients of stage 3"),
        "offload": (("none",), "DeepSpeed sums the gradients of offload"),
        "communication_dtype": (("auto", "fp32"), "gradients are sent in fp64"),
        "lanes_per_pass": ((1,), "lanes in one pass share its dropout masks and roundings"),
    }
    for key, (values, reason) in needed.items():
        if (given := getattr(training, key)) not in values:
            allowed = " or ".join(str(value).lower() for value in values)
            yield f"training.same_bits: true needs training.{key}: {allowed}, got {str(given).lower()}: {reason}"


def _check_divergence(training: Any, divergence: Any) -> Iterator[str]:
    if divergence.policy == "switch_to_bf16" and training.precision == "fp32":
        yield (
            "divergence.policy: switch_to_bf16 is for training.precision: fp16, got fp32, which is more exact; use "
            "lower_learning_rate or stop"
        )


def check_lanes(data: Any, slurm: Any) -> Iterator[str]:
    num_ranks = slurm.nodes * slurm.ranks_per_node
    if num_ranks > data.lanes:
        yield (
            f"slurm.nodes: {slurm.nodes} nodes x {slurm.ranks_per_node} ranks = {num_ranks} ranks, more than data.lanes "
            f"{data.lanes}; a rank needs a lane of its own"
        )


def _check_batches(data: Any) -> Iterator[str]:
    longest = 2 * data.filters.max_tokens
    if data.max_tokens != "auto" and longest > data.max_tokens:
        yield (
            f"data.max_tokens: {data.max_tokens} cannot hold one pair of two sides of data.filters.max_tokens "
            f"{data.filters.max_tokens}; needs at least {longest}"
        )


def check_model(model: Any) -> Iterator[str]:
    if model.d_model % model.num_heads and None in (model.key_size, model.value_size):
        yield (
            f"model.num_heads: {model.num_heads} heads do not divide d_model {model.d_model}; take another number, or give "
            "model.key_size and model.value_size"
        )
    if (model.positions == "learned") != (model.max_positions is not None):
        yield (
            f"model.max_positions: got {model.max_positions or 'none'} with model.positions {model.positions}: learned "
            "positions need it (data.filters.max_tokens is enough), the others have no longest sentence; set both or "
            "neither"
        )
    keys = model.key_size or model.d_model // model.num_heads
    if model.positions == "rotary" and keys % 2:
        yield (
            f"model.positions: rotary turns pairs: heads need keys of an even size, got {keys}; give an even "
            "model.key_size, another model.num_heads or other positions"
        )
    if model.d_model % 2 and model.positions in ("sinusoidal", "marian"):
        yield f"model.d_model: sinusoidal positions (3.5) need an even width, got {model.d_model}"
    if model.shared_embeddings and not model.tied_output:
        yield "model.tied_output: false needs model.shared_embeddings: false (3.4 shares all three matrices)"


def _check_plugin(model: Any, training: Any, data: Any) -> Iterator[str]:
    """Checks that nothing is set which only our own network can do."""
    if model.plugin is None:
        return
    for key, is_set in (
        ("training.activation_checkpointing", training.activation_checkpointing),
        ("training.init_from", training.init_from is not None),
        ("training.lanes_per_pass above 1", training.lanes_per_pass > 1),
        ("training.guided_alignment", training.guided_alignment > 0),
        ("data.max_tokens: auto", data.max_tokens == "auto"),
    ):
        if is_set:
            yield f"model.plugin: {model.plugin}: {key} is for our own network; remove one of the two"


def _check_positions(data: Any, model: Any) -> Iterator[str]:
    if model.max_positions is not None and data.filters.max_tokens > model.max_positions:
        yield (
            f"model.max_positions: {model.max_positions} learned positions cannot take a sentence of "
            f"data.filters.max_tokens {data.filters.max_tokens}; raise the first or lower the second"
        )


def _check_vocabulary(tokenizer: Any, model: Any) -> Iterator[str]:
    if model.shared_embeddings and not tokenizer.shared:
        yield "model.shared_embeddings: true needs tokenizer.shared: true; set both or neither"
    if tokenizer.target_model and not tokenizer.source_model:
        yield "tokenizer.target_model: is given without tokenizer.source_model; give both, or source_model alone"
    if tokenizer.source_model is None and tokenizer.character_coverage < 0.98:
        yield f"tokenizer.character_coverage: {tokenizer.character_coverage}, but sentencepiece takes 0.98 to 1"
    if tokenizer.source_model and not tokenizer.target_model and not tokenizer.shared:
        yield "tokenizer.source_model: separate vocabularies need both source_model and target_model, or neither"


def _check_validation(validation: ValidationConfig, data: DataConfig) -> Iterator[str]:
    yield from _metric_problems(validation, data)
    if corpus_and_measure(validation.metric)[0] is None and data.validation is None:
        for key in ("patience", "target"):
            if getattr(validation, key) is not None:
                yield (
                    f"validation.{key}: is about {validation.metric} of data.validation, which is not given; give it, or "
                    "name another corpus in validation.metric"
                )
    if validation.plugin is not None and not validation.translate:
        yield "validation.plugin: scores translations, and validation.translate is false; set it true, or remove plugin"


def _metric_problems(validation: ValidationConfig, data: DataConfig) -> Iterator[str]:
    corpus, measure = corpus_and_measure(validation.metric)
    if corpus is not None and corpus not in data.more_validation:
        there = ", ".join(data.more_validation) or "none"
        yield f"validation.metric: {corpus!r} is no corpus of data.more_validation; there are: {there}"
    measures = (*TOKEN_MEASURES, *TRANSLATION_MEASURES)
    if measure not in measures:
        yield (
            f"validation.metric: {measure!r} is no measure; expected one of {', '.join(measures)}, for a corpus of "
            "data.more_validation with its name in front: NAME/bleu"
        )
    elif measure in TRANSLATION_MEASURES and not validation.translate:
        yield f"validation.metric: {measure} needs validation.translate: true; set it, or take another metric"
    elif measure == "plugin" and validation.plugin is None:
        yield "validation.metric: plugin needs validation.plugin, the function that computes it; set both or neither"


_CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    *(lambda run: run_name_problems(run.name), _check_paths),
    *(check_model, _check_positions, _check_plugin, _check_vocabulary),
    *(_check_schedule, _check_matrices, _check_step, check_patterns, check_lanes, _check_batches),
    *(data_checks.check_corpora, data_checks.check_filters, data_checks.check_mixture, data_checks.check_sampling),
    *(_check_checkpoints, _check_validation, _check_divergence, _check_tracking),
)
