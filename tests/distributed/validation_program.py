"""`validation_program.py RUN RESULTS NUM_RANKS` validates the newest checkpoint of a run under every ZeRO stage.

Rank 0 writes what was measured and every translation as JSON.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from running import Command  # noqa: E402

from dist_transformer.processes.launching import fork_local_ranks  # noqa: E402

SHORT = [(0, "bf16"), (1, "bf16"), (3, "bf16"), (1, "fp16"), (3, "fp16")]
COMBINATIONS = [*((stage, "fp32") for stage in range(4)), *SHORT]


def launch(command: Command, run: Path, num_ranks: int, folder: Path) -> dict[str, Any]:
    """What `num_ranks` ranks found, by stage and precision; the short precisions on 2 ranks only."""
    results = folder / f"{num_ranks}.json"
    code, said = command.program(Path(__file__), run, results, num_ranks)
    assert code == 0, said
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return found


def run_as_rank(run: Path, results: Path) -> None:
    import torch

    from dist_transformer.config.loading import load_config
    from dist_transformer.data.manifest import Manifest
    from dist_transformer.data.prepare.preparation import prepared_folder
    from dist_transformer.distributed import group
    from dist_transformer.run.folder import RunDir
    from dist_transformer.training.checkpoint import checkpoints
    from dist_transformer.training.engine.engine import Engine
    from dist_transformer.training.run_data import open_run_data
    from dist_transformer.training.trainer import build_objective
    from dist_transformer.training.validation import runner
    from dist_transformer.training.validation.translation import dry_run_of_validation, open_validator

    ranks = group.join(60)
    torch.set_num_threads(1)
    runner.SAMPLES = 1000
    found = {}
    for stage, precision in COMBINATIONS if ranks.num_ranks == 2 else COMBINATIONS[:4]:
        given = [f"training.zero_stage={stage}", f"training.precision={precision}"]
        config = load_config(run / "config.yaml", given, check_files=False)
        folder = prepared_folder(config)
        manifest = Manifest.load(folder)
        engine = Engine(
            build_objective(config.model, config.training, manifest), config.training, config.optimizer, ranks
        )
        checkpoint = checkpoints.newest_complete(RunDir(run), None)
        assert checkpoint is not None
        checkpoints.load(checkpoint, engine)
        progress: list[int] = []
        data = open_run_data(config, folder, manifest)
        heard: list[str] = []
        ways: dict[str, Any] = {
            "watchdog": SimpleNamespace(progress=heard.append),
            "wants_stop": lambda: False,
            "training": config.training,
        }
        ways["doing"] = lambda what, heard=heard: lambda: heard.append(what)
        start: Any = SimpleNamespace(config=config, ranks=ranks, data=data, manifest=manifest, **ways)
        validator = open_validator(start, engine)
        heard.clear()
        random_state = torch.random.get_rng_state()
        dry_run_of_validation(start, validator)
        validated = validator.validate(checkpoint.step, lambda calls=progress: calls.append(1))
        found[f"{stage} {precision}"] = {
            "values": validated.values,
            "translations": {
                each["corpus"]: {s["number"]: s["translation"] for s in each["sentences"]} for each in validated.samples
            },
            "random_state_moved": not torch.equal(torch.random.get_rng_state(), random_state),
            "differs": len(
                {json.dumps(other) for other in ranks.all_gather_object([validated.values, validated.samples])}
            )
            > 1,
            "is_training": engine.objective.training,
            "dry_run": len(heard),
            "progress": ranks.all_gather_object(len(progress)),
        }
        engine.close()
    if ranks.is_rank_zero:
        results.write_text(json.dumps(found), encoding="utf-8")
    ranks.barrier()
    group.leave()
    sys.stdout.flush()
    os._exit(0)  # as `train` does: threads of gloo's may outlive the interpreter, and abort


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(fork_local_ranks(partial(run_as_rank, Path(sys.argv[1]), Path(sys.argv[2])), int(sys.argv[3])))
