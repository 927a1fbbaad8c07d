"""`data audit`: checks by the recorded row ids that a run used every row as often as was due."""

from itertools import islice

from dist_transformer.config.schema import Config
from dist_transformer.data.loader.audit import Audit
from dist_transformer.data.loader.position import Position, position_from_json
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare.preparation import prepared_folder
from dist_transformer.errors import CheckpointError, DataError, UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.tensor_files import STATE, read_state
from dist_transformer.training.run_data import RunData


def audit_run(config: Config, run_dir: RunDir) -> None:
    """Checks the batches up to the newest checkpoint, and prints how often rows were used.

    Raises:
        UserError: the run did not record its row ids, or has no checkpoint.
        DataError: a row was lost or repeated, or a digest is not that of its rows.
    """
    if not run_dir.audit.is_file():
        raise UserError(f"{run_dir.audit}: no such file; the row ids are written by a run with data.audit=true")
    if not (saved := checkpoints.saved(run_dir)):
        raise UserError(f"{run_dir.checkpoints}: no checkpoint yet; batches are checked up to the newest one")
    try:
        state = read_state(saved[-1])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{saved[-1] / STATE}: cannot be read ({error}); remove the checkpoint") from error
    position = position_from_json(state["position"], str(saved[-1] / STATE))
    folder = prepared_folder(config)
    data = RunData(config, folder, Manifest.load(folder))
    audit = _read(config, run_dir, data, state["batches"], position)
    problems = list(audit.problems(data.planner_of(len(position.lanes)), position))
    for line in audit.usages():
        print(line)
    if audit.wrong_digests:
        problems.append(f"the digest of step {audit.wrong_digests[0]} is not that of its rows")
    if audit.num_batches < state["batches"]:
        problems.append(f"it has {audit.num_batches} batches, {saved[-1].name} was made after {state['batches']}")
    if problems:
        raise DataError(f"{run_dir.audit}: " + "; ".join(problems))
    dropped = "; rows dropped by filters or in quarantine are not looked for" if _may_drop(config) else ""
    print(
        f"{audit.num_batches} batches up to {saved[-1].name}: every row as often as was due, none lost, none "
        f"repeated{dropped}"
    )


def _read(config: Config, run_dir: RunDir, data: RunData, num_batches: int, position: Position) -> Audit:
    mixture = config.data.mixture
    has_weights = mixture is not None and bool(mixture.weights or mixture.schedule or mixture.temperature != 1.0)
    audit = Audit(data.folder, data.manifest, has_weights, _may_drop(config), position.ever_quarantined)
    for number, record in enumerate(islice(read_records(run_dir.audit), num_batches), start=1):
        try:
            audit.add(record)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(f"{run_dir.audit}: record {number} is not one of a batch ({error!r})") from error
    return audit


def _may_drop(config: Config) -> bool:
    return config.data.on_the_fly or config.data.on_bad_row_group == "quarantine"
