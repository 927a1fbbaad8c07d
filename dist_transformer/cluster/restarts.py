"""What the batch script asks: which run folder is this, and after an attempt, does the job go back to the queue?

    python -m dist_transformer.cluster.restarts folder CONFIG_OR_RUN_FOLDER [section.key=value ...]
    python -m dist_transformer.cluster.restarts decide RUN_FOLDER EXIT_CODE      # exits 0: requeue, 1: stop

An attempt that made a new checkpoint may always be followed by another. Without one, at most
`slurm.max_restarts_without_progress` attempts follow: a job that dies at the same place for ever must not.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.config.loading import load_config
from dist_transformer.config.models import SlurmConfig
from dist_transformer.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, UserError
from dist_transformer.run_dir import RunDir, read_json, write_json


@dataclass(frozen=True)
class Decision:
    """`reason` is a line for the job's log."""

    requeue: bool
    reason: str


def run_folder(arguments: list[str]) -> RunDir:
    """The run folder that `train` with these arguments works on.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    if Path(arguments[0]).is_dir():
        return RunDir(Path(arguments[0]))
    run = load_config(Path(arguments[0]), arguments[1:], check_files=False).run
    return RunDir(Path(run.root) / run.name)


def decide(run_dir: RunDir, exit_code: int, max_restarts: int) -> Decision:
    """Whether the job goes back to the queue after an attempt that ended so; counts the attempt if it does."""
    if exit_code in (EXIT_DONE, EXIT_USER_ERROR):
        return Decision(False, "done" if exit_code == EXIT_DONE else "a mistake that a restart cannot mend")
    if exit_code == EXIT_REQUEUE and run_dir.stop_file.exists():
        return Decision(False, f"stopped by the file {run_dir.stop_file}")
    newest, without_progress = newest_checkpoint(run_dir), 0
    if run_dir.restarts.exists():
        before = read_json(run_dir.restarts)
        if before["newest_checkpoint"] == newest:
            without_progress = before["without_progress"]
    if without_progress >= max_restarts:
        return Decision(False, f"{without_progress} restarts without a new checkpoint after {newest}")
    write_json(run_dir.restarts, {"newest_checkpoint": newest, "without_progress": without_progress + 1})
    return Decision(True, f"newest checkpoint {newest}, restart {without_progress + 1} of {max_restarts} from there")


def newest_checkpoint(run_dir: RunDir) -> str | None:
    """Name of the newest finished checkpoint; one under work has another name."""
    if not run_dir.checkpoints.is_dir():
        return None
    names = [path.name for path in run_dir.checkpoints.iterdir() if re.fullmatch(r"step_\d+", path.name)]
    return max(names, key=lambda name: int(name.removeprefix("step_")), default=None)


def _max_restarts(run_dir: RunDir) -> int:
    # A first attempt that failed very early has left no configuration.
    if not run_dir.config.exists():
        return SlurmConfig.model_validate({}).max_restarts_without_progress
    return load_config(run_dir.config, check_files=False).slurm.max_restarts_without_progress


def main(arguments: list[str]) -> int:
    """The two commands of the batch script; returns the exit code."""
    try:
        match arguments:
            case ["folder", _, *_]:
                run_dir = run_folder(arguments[1:])
                run_dir.slurm.mkdir(parents=True, exist_ok=True)
                print(run_dir.path)
                return 0
            case ["decide", folder, exit_code]:
                run_dir = RunDir(Path(folder))
                decision = decide(run_dir, int(exit_code), _max_restarts(run_dir))
                print("requeued:" if decision.requeue else "not requeued:", decision.reason, flush=True)
                return 0 if decision.requeue else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    print("expected: folder CONFIG_OR_RUN_FOLDER [section.key=value ...], or decide RUN_FOLDER EXIT_CODE; "
          f"got: {' '.join(arguments) or 'nothing'}", file=sys.stderr)  # fmt: skip
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
