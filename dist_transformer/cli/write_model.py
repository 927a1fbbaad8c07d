"""From the checkpoints of a run to a model folder."""

from pathlib import Path

from dist_transformer.config.models import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.errors import CheckpointError
from dist_transformer.interop.averaging import average_weights
from dist_transformer.interop.model_folder import ModelInformation, TokenizerFiles, save_model_folder
from dist_transformer.run_dir import RunDir, read_json
from dist_transformer.training import checkpoints


def write_averaged_model(
    config: Config, run_dir: RunDir, prepared: Path, manifest: Manifest, output: Path, last: int | None = None
) -> list[Path]:
    """Averages the newest `last` checkpoints (default: checkpoints.average_last) into `output`; returns those used.

    Raises:
        CheckpointError: there is no checkpoint, or one of them is damaged.
    """
    used = checkpoints.saved(run_dir)[-(last or config.checkpoints.average_last) :]
    if not used:
        raise CheckpointError(f"{run_dir.checkpoints}: there is no checkpoint to make a model of; train first")
    for path in used:
        if problem := checkpoints.damage(path):
            raise CheckpointError(f"{path} is damaged ({problem}); move it away and average the others")
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
    weights = average_weights([checkpoints.read_weights(path) for path in used])
    save_model_folder(output, weights, config.model, TokenizerFiles(prepared / files.source, target), information)
    return used
