"""From the checkpoints of a run to a model folder."""

import logging
from pathlib import Path

from dist_transformer.config.models import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.errors import CheckpointError
from dist_transformer.interop.averaging import average_weights
from dist_transformer.interop.model_folder import ModelInformation, TokenizerFiles, save_model_folder
from dist_transformer.run_dir import RunDir, read_json
from dist_transformer.training import checkpoints

log = logging.getLogger(__name__)


def write_averaged_model(
    config: Config, run_dir: RunDir, prepared: Path, manifest: Manifest, output: Path, last: int | None = None
) -> list[Path]:
    """Averages the newest `last` checkpoints (default: checkpoints.average_last) into `output`; returns those used.

    Checkpoints of stops are left out, so that a run that was stopped gives the model of one that was not; so are
    damaged ones, with a warning.

    Raises:
        CheckpointError: there is no whole checkpoint.
    """
    wanted = checkpoints.regular(run_dir, config.checkpoints.every_steps)[-(last or config.checkpoints.average_last) :]
    used = [path for path in wanted if _is_whole(path)]
    if not used:
        raise CheckpointError(f"{run_dir.checkpoints}: there is no whole checkpoint to make a model of; train first")
    files = manifest.tokenizer
    target = None if files.target == files.source else prepared / files.target
    information = ModelInformation(
        source_vocabulary=manifest.source_vocabulary,
        target_vocabulary=manifest.target_vocabulary,
        pad_id=manifest.pad_id,
        bos_id=manifest.bos_id,
        eos_id=manifest.eos_id,
        source_language=manifest.source_language,
        target_language=manifest.target_language,
        step=read_json(used[-1] / "state.json")["step"],
    )
    weights = average_weights([checkpoints.Weights(path) for path in used])
    save_model_folder(output, weights, config.model, TokenizerFiles(prepared / files.source, target), information)
    return used


def _is_whole(path: Path) -> bool:
    problem = checkpoints.damage(path)
    if problem:
        log.warning("%s is damaged (%s): left out of the average", path, problem)
    return problem is None
