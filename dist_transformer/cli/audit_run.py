"""data audit: whether a run used every row exactly once, by the row ids that it wrote down."""

from dist_transformer.config.models import Config
from dist_transformer.data.audit import Audit, Usage
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare import prepared_folder
from dist_transformer.errors import DataError, UserError
from dist_transformer.run_dir import RunDir, read_json
from dist_transformer.tracking.metrics_log import read_records


def audit_run(config: Config, run_dir: RunDir) -> None:
    """Prints how often rows were used.

    Raises:
        UserError: the run did not write its row ids down.
        DataError: a row was lost or repeated, or a digest is not that of its rows.
    """
    if not run_dir.audit.is_file():
        raise UserError(f"{run_dir.audit}: no such file; the row ids are written by a run with data.audit=true")
    folder = prepared_folder(config)
    manifest, mixture = Manifest.load(folder), config.data.mixture
    has_weights = mixture is not None and bool(mixture.weights or mixture.schedule or mixture.temperature != 1.0)
    may_drop = config.data.on_the_fly or config.data.on_bad_row_group == "quarantine"
    audit = Audit(folder, manifest, has_weights, may_drop)
    for record in read_records(run_dir.audit):
        audit.add(record)
    is_finished = run_dir.state.is_file() and read_json(run_dir.state)["state"] == "finished"
    usages = list(audit.usages(config.training.max_epochs or 0 if is_finished else 0))
    for usage in usages:
        print(_line(usage))
    problems = [f"{usage.corpus}, {_when(usage)}: {usage.problem}" for usage in usages if usage.problem]
    if audit.wrong_digests:
        problems.append(f"the digest of step {audit.wrong_digests[0]} is not that of its rows")
    if problems:
        raise DataError(f"{run_dir.audit}: " + "; ".join(problems))
    print(f"{audit.num_batches} batches, their digests are those of their rows; no row lost, none repeated")


def _line(usage: Usage) -> str:
    times = "each once" if usage.most == 1 else f"at most {usage.most} times each"
    return f"{_when(usage)}, {usage.corpus}: {usage.used:,} of {usage.kept:,} rows, {times}"


def _when(usage: Usage) -> str:
    if usage.epoch is None:
        return "whole run"
    return f"epoch {usage.epoch}" + ("" if usage.is_complete else " (so far)")
