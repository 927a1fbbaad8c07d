"""Output of training for people: estimates at the start, one line per log step, a progress bar on a terminal."""

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rich import progress
from rich.console import Console

from dist_transformer.config.model_size import count_by_part, offloaded_bytes, state_bytes
from dist_transformer.config.schema import Config, TrainingConfig
from dist_transformer.data.manifest import Manifest
from dist_transformer.planning.step_time import FILLED_SHARE
from dist_transformer.training.engine.schedule import peak_learning_rate
from dist_transformer.training.memory import as_text
from dist_transformer.training.train_state import Interval

log = logging.getLogger(__name__)


def log_estimate(config: Config, training: TrainingConfig, manifest: Manifest, num_ranks: int) -> None:
    """Logs the estimates before the first step, of tokens that may be rounded to none; `training`: as this start computes."""
    model, splits = config.model, [manifest.splits[name] for name in manifest.training]
    source, target = (max(1, sum(getattr(s, f"{side}_tokens") for s in splits)) for side in ("source", "target"))
    per_step = min(config.data.lanes * config.data.token_budget() * FILLED_SHARE, source + target)
    parameters = count_by_part(model, manifest.source_vocabulary, manifest.target_vocabulary)
    log.info(
        "model      %s parameters: %d + %d layers, d_model %d, d_ff %d, %d heads, vocabulary %d / %d, norm %s",
        f"{parameters.total:,}", model.num_encoder_layers, model.num_decoder_layers, model.d_model, model.d_ff,
        model.num_heads, manifest.source_vocabulary, manifest.target_vocabulary, model.norm,
    )  # fmt: skip
    for name, split in zip(manifest.training, splits, strict=True):
        dropped = ", ".join(f"{rule} {count}" for rule, count in split.dropped.items() if count) or "none"
        log.info(
            "data       %s: %s pairs, %s%s source + %s target tokens; dropped: %s",
            name, f"{split.rows:,}", "about " if split.text else "", f"{split.source_tokens:,}",
            f"{split.target_tokens:,}", "when they are tokenized" if split.text else dropped,
        )  # fmt: skip
    log.info("prepared   digest %s", manifest.digest[:12])
    log.info(
        "batch      %d lanes of %d tokens: about %s source + %s target tokens a step, %d steps an epoch",
        config.data.lanes, config.data.token_budget(), f"{round(per_step * source / (source + target)):,}",
        f"{round(per_step * target / (source + target)):,}", math.ceil((source + target) / per_step),
    )  # fmt: skip
    ends = {"steps": training.max_steps, "epochs": training.max_epochs}
    log.info(
        "training   %s, ZeRO stage %d, %d ranks; %s, warm-up %d, peak learning rate %.3g; %s",
        training.precision, training.zero_stage, num_ranks, config.schedule.name, config.schedule.warmup_steps,
        peak_learning_rate(config), " or ".join(f"{count} {unit}" for unit, count in ends.items() if count is not None),
    )  # fmt: skip
    held = as_text(state_bytes(parameters, training, num_ranks))
    log.info("memory     about %s a rank for weights, gradients and optimizer", held)
    if offloaded := offloaded_bytes(parameters.total, training, num_ranks):
        log.info("offload    about %s a rank in the CPU's memory", as_text(offloaded))


def interval_values(interval: Interval, seconds: float) -> dict[str, float | int]:
    """Returns the values of a record for the batches of an interval; corpora by name only if there are several."""
    by_corpus = interval.pairs_by_corpus if len(interval.pairs_by_corpus) > 1 else {}
    return {
        "target_tokens": interval.target_tokens,
        "tokens_per_second": interval.target_tokens / seconds,
        "padding_share": 1 - (interval.source_tokens + interval.target_tokens) / interval.padded_tokens,
        "straggler_ratio": interval.straggler_sum / interval.batches,
        "data_wait_share": min(1.0, interval.wait_seconds / seconds),
        "save_seconds": interval.save_seconds,
        "validation_seconds": interval.validation_seconds,
        **{f"pairs/{name}": count for name, count in by_corpus.items()},
        **{f"dropped/{rule}": count for rule, count in sorted(interval.dropped.items())},
    }


def log_interval(step: int, values: Mapping[str, float | int | str]) -> None:
    """Logs the line of a log step."""
    log.info(
        "step %7d  epoch %3d  loss %7.4f  nll %7.4f  lr %.3e  norm %7.3f  scale %g  "
        "%7.0f tokens/s  pad %4.1f%%  wait %4.1f%%  mfu %4.1f%%",
        step, values["epoch"], values["loss"], values["nll"], values["learning_rate"], values["gradient_norm"],
        values["loss_scale"], values["tokens_per_second"], 100 * float(values["padding_share"]),
        100 * float(values["data_wait_share"]), 100 * float(values["mfu"]),
    )  # fmt: skip


@dataclass(frozen=True)
class Terminal:
    """Output of a start of training beside its files.

    Attributes:
        quiet: warnings and errors only.
        as_json: each record of metrics.jsonl on standard output too.
        profile: a profile of some of the first steps.
    """

    quiet: bool = False
    as_json: bool = False
    profile: bool = False


class ProgressBar:
    """A progress bar, while the block of its `progress` lasts, if stderr is a terminal; else nothing (the log lines have the
    same values).

    step ━━━━━━━╸━━━━━━ 12345/100000  loss 4.123  81,204 tokens/s  bleu 27.31 (step 12000)  save in 655  0:41:07 4:50:12
    """

    def __init__(self, total_steps: int | None, step: int, save_every_steps: int, quiet: bool = False) -> None:
        columns = (
            progress.TextColumn("[bold]step"), progress.BarColumn(), progress.MofNCompleteColumn(),
            progress.TextColumn("{task.description}"), progress.TimeElapsedColumn(), progress.TimeRemainingColumn(),
        )  # fmt: skip
        self.progress = progress.Progress(
            *columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty(), transient=True
        )
        self._task: progress.TaskID = self.progress.add_task("", total=total_steps, completed=step)
        self._save_every_steps = save_every_steps
        self._speed = self._score = ""

    def show(self, step: int, loss: float | None = None, tokens_per_second: float | None = None) -> None:
        """Updates the bar; without loss and speed it shows the last ones."""
        if loss is not None:
            self._speed = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  "
        to_save = self._save_every_steps - step % self._save_every_steps
        self.progress.update(self._task, completed=step, description=f"{self._speed}{self._score}save in {to_save}")

    def show_score(self, step: int, measure: str, value: float) -> None:
        """Shows the newest value of validation.metric."""
        self._score = f"{measure} {value:.2f} (step {step})  "
