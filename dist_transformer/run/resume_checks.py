"""Checks that a configuration can resume a run folder: its checkpoints are of one model and one order of the data.

The keys of `recipe_settings` are those of the `recipe` in a checkpoint's state.json. The digests of the corpus and of
the tokenizer, which only training knows, are compared there.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_transformer.config.schema import Config
from dist_transformer.config.slurm_schema import Stage
from dist_transformer.plugins import find
from dist_transformer.run.attempts import newest_checkpoint
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record

MODEL_FREE = {"preset", "dropout", "layer_drop", "attention_gain"}
"""Settings of the model that may change at a resume: they affect its training and how its first weights are drawn."""

METRIC = "validation.plugin"


def differs(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if a resume must not change the setting as it is changed here. A metric may come and go."""
    values = before.get(key), now.get(key)
    return values[0] != values[1] and not (key == METRIC and None in values)


def recipe_settings(config: Config) -> dict[str, Any]:
    """Returns the settings that a resume must find unchanged: the shape of the model and the order of the data."""
    model = config.model.model_dump(exclude=MODEL_FREE)
    if config.model.plugin is not None:
        model["plugin"] = find("model.plugin", config.model.plugin).identity
    metric = config.validation.plugin
    data = config.data.model_dump(include={"lanes", "max_tokens", "window_rows"})
    return {
        **{f"model.{key}": value for key, value in model.items()},
        **{f"data.{key}": value for key, value in data.items()},
        "data.batch_shapes": "free",  # a former setting: batches of other shapes cannot be continued
        "run.seed": config.run.seed,
        METRIC: None if metric is None else find(METRIC, metric).identity,
        "tokenizer.sampling": config.tokenizer.sampling,
        # Muon has no second moments to go on with.
        "optimizer.matrices": None if config.optimizer.matrices == "adam" else config.optimizer.matrices,
        "data.modifiers": {name: share for name, share in sorted(config.data.modifiers.items()) if share} or None,
    }


def recipe_of_checkpoint(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a checkpoint that are compared; settings newer than the checkpoint get the value that was
    then the only one."""
    free = {f"model.{name}" for name in MODEL_FREE}
    return {
        "model.norm_type": "layer",
        "model.activation": "relu",
        "model.positions": "learned" if recipe.get("model.max_positions") else "sinusoidal",
        "model.output_bias": False,
        "model.final_norm": None,
        **{key: value for key, value in recipe.items() if key not in free},
    }


def checkpoint_problems(config: Config, run_dir: RunDir) -> Iterator[str]:
    """Yields a problem if settings differ from those of the newest checkpoint, which they then cannot resume."""
    newest = newest_checkpoint(run_dir)
    before = read_record(run_dir.checkpoints / newest / "state.json").get("recipe") if newest else None
    if not before:
        return
    before = recipe_of_checkpoint(before)
    now = recipe_settings(config)
    if now["data.max_tokens"] == "auto":  # the number that was found is kept
        del now["data.max_tokens"]
    if before.get("data.lanes") == config.data.reslice_from:
        del now["data.lanes"]
    changed = [key for key in sorted(now) if differs(key, before, now)]
    if changed:
        changes = ", ".join(f"{key}: {before.get(key)} -> {now[key]}" for key in changed)
        reslice = f", set data.reslice_from={before['data.lanes']}" if changed == ["data.lanes"] else ""
        yield (
            f"run folder {run_dir.path}: its checkpoint {newest} cannot be resumed: {changes}; put "
            f"{'it' if len(changed) == 1 else 'them'} back{reslice}, or choose another run.name"
        )


def initial_weights_problems(config: Config, run_dir: RunDir | None = None) -> Iterator[str]:
    """Yields a problem if a run cannot start with what is at training.init_from; none if `run_dir` has a checkpoint to resume."""
    path = Path(config.training.init_from or "")
    if config.training.init_from is None or (run_dir and newest_checkpoint(run_dir)):
        return
    weights = (path / "model.safetensors", path / "manifest.json", RunDir(path).model / "model.safetensors")
    if not any(file.is_file() for file in weights) and not newest_checkpoint(RunDir(path)):
        yield (
            f"training.init_from: {path} {'has no weights' if path.is_dir() else 'is no folder'}; expected a run folder "
            "with model/ or checkpoints/, one checkpoint, or a model folder"
        )


def stage_problems(config: Config, run_dir: RunDir, stages: Sequence[Stage], after: Sequence[str]) -> Iterator[str]:
    """Yields a problem for each stage that would have nothing to do or nothing to start from."""
    if "evaluate" in stages and config.data.test is None:
        yield "data.test: is not given, and the stage evaluate scores it; give it, or leave the stage out"
    if "evaluate" in stages and config.model.plugin is not None:
        yield "model.plugin: is code that the stage evaluate cannot load; leave the stage out, and call evaluate --plugin later"
    if "train" in stages:
        run = read_record(run_dir.state)
        step, max_steps = int(run.get("step", 0)), config.training.max_steps
        if run.get("state") == "finished" and max_steps is not None and step >= max_steps:
            yield (
                f"{run_dir.path}: is finished at step {step} of {max_steps}; give a larger training.max_steps to continue"
            )
    elif {"average", "evaluate"} & {*stages} and not (after or newest_checkpoint(run_dir) or run_dir.model.is_dir()):
        yield (
            f"run folder {run_dir.path}: has neither a checkpoint nor model/, so --stages {','.join(stages)} would find "
            "nothing; put train before them, or name with --after the job that trains it"
        )
