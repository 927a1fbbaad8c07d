"""`train RUN --replay-crash`: computes the micro-batches of a failed rank again on one rank. The run is not changed."""

import sys
import traceback

import torch

from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare.preparation import prepared_folder
from dist_transformer.distributed import group
from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, DistTransformerError, UserError
from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.checkpoints import Checkpoint
from dist_transformer.training.checkpoint.tensor_files import STATE
from dist_transformer.training.crash import Crash, read_crash
from dist_transformer.training.divergence import Diverged
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.train_state import dropout_seed
from dist_transformer.training.trainer import build_objective


def replay_crash(run_config: Config, run_dir: RunDir, rank: int | None, overrides: list[str] | None) -> int:
    """Computes forward and backward of each micro-batch of the crash, with its dropout. Returns the exit code.

    Args:
        run_config: configuration of the run folder, which names the prepared corpus.
        rank: rank to replay; None: the last one that failed by itself.
        overrides: changes of the crash's configuration: training.precision=fp32 shows whether precision is the cause.

    Raises:
        UserError: there is no crash to replay.
    """
    crash = read_crash(run_dir, rank)
    config, manifest = crash.config(overrides), Manifest.load(prepared_folder(run_config))
    values = crash.values
    print(f"crash      {values['exception']} at step {values['step']}: {_first_line(values['text'])}")
    if not crash.lanes:
        raise UserError(
            f"{crash.path}: the rank crashed before its first batch, or had none: there is nothing to replay"
        )
    ranks = group.join(config.training.hang_seconds)
    try:
        engine = _engine(config, manifest, ranks)
        _load_weights(engine, run_dir, int(values["step"]))
        for lane in crash.lanes:
            _replay_lane(engine, crash, lane, config.run.seed, ranks.device)
    except (DistTransformerError, KeyboardInterrupt):
        raise
    except Exception as error:  # noqa: BLE001  (any error: its recurrence is the result)
        traceback.print_exc()
        print(f"crashed again: {type(error).__name__}: {_first_line(str(error))}")
        sys.stderr.flush()
        return EXIT_FAILED
    print("did not crash again")
    return EXIT_DONE


def _replay_lane(engine: Engine, crash: Crash, lane: int, seed: int, device: torch.device) -> None:
    """Computes one micro-batch as its rank's whole step. A learning rate of 0 keeps the weights unchanged."""
    tokens, batches = int(crash.values["target_tokens"]), int(crash.values["batches"])
    scaler = engine.scaler_state()
    torch.manual_seed(dropout_seed(seed, batches, lane))
    loss, _ = engine(*(side.to(device) for side in crash.sides(lane)))
    engine.backward(loss, tokens)
    is_finite = _has_finite_gradient(engine)
    engine.set_scaler_state(scaler)
    pairs, own_tokens = crash.pairs_and_tokens(lane)
    print(
        f"lane {lane:4d}  {pairs} pairs  loss {float(loss.detach()) / own_tokens:.4f} a token  gradient norm "
        f"{engine.gradient_norm():.4g}  {'finite' if is_finite else 'NOT FINITE'}",
        flush=True,
    )


def _has_finite_gradient(engine: Engine) -> bool:
    try:
        return engine.step(0.0)
    except Diverged:
        return False


def _engine(config: Config, manifest: Manifest, ranks: Ranks) -> Engine:
    torch.manual_seed(config.run.seed)
    return Engine(build_objective(config.model, config.training, manifest), config.training, config.optimizer, ranks)


def _load_weights(engine: Engine, run_dir: RunDir, crash_step: int) -> None:
    """Loads the weights of the newest complete checkpoint before the crash; damaged ones are not set aside."""
    for path in reversed(checkpoints.saved(run_dir)):
        if checkpoints.step_of(path) >= crash_step:
            continue
        if (problem := checkpoints.damage(path)) is not None:
            print(f"weights    not {path.name}, which is damaged: {problem}")
            continue
        checkpoints.load(Checkpoint(path, read_json(path / STATE)), engine)
        older = crash_step - 1 - checkpoints.step_of(path)
        print(f"weights    {path.name}, {older} updates before those that crashed")
        return
    print("weights    as they are at the start of a run: no complete checkpoint is older than the crash")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
