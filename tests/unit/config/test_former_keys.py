"""Files, run folders and checkpoints of earlier versions have settings that went: what becomes of each."""

import json
from importlib import import_module
from pathlib import Path

import pytest
from config_problems import problems_of

from dist_transformer.cluster.profiles import load_profile
from dist_transformer.config.former_keys import CONSTANTS, current_settings
from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import Config
from dist_transformer.errors import ConfigError

BASE = "run: {name: test}\ndata: {train: {demo: train}}\ntraining: {max_steps: 5000}\n"
MODULES = {
    "divergence": "training.divergence",
    "checkpoints.save_attempts": "training.checkpoint.async_writer",
    "data.read_attempts": "data.sources.retries",
    "tracking.close_seconds": "tracking.tracker",
    "tracking.upload_megabytes": "tracking.outbox",
    "training.loss_scale_window": "training.engine.engine",
    "training.initial_loss_scale": "training.engine.engine",
    "slurm.preflight_seconds": "cluster.script",
    "slurm.preflight_tolerance": "cluster.script",
    "tokenizer": "data.tokenizer.tokenizer",
    "validation.samples": "training.validation.runner",
}
"""Where the constants are; those that are none have no module."""
FORMER = {(section, key): value for section, part in CONSTANTS.items() for key, value in part.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def written(path: Path, text: str = "") -> Path:
    path.write_text(f"{BASE}{text}", encoding="utf-8")
    return path


@pytest.mark.parametrize(("section", "key"), FORMER)
def test_a_former_setting_has_the_value_of_the_constant_that_it_became(section: str, key: str) -> None:
    module = MODULES.get(f"{section}.{key}", MODULES.get(section))
    if module is not None:
        assert getattr(import_module(f"dist_transformer.{module}"), key.upper()) == FORMER[section, key]


def test_a_setting_that_became_a_constant_may_stand_where_it_has_its_value(path: Path) -> None:
    sections: dict[str, list[str]] = {}
    for (section, key), value in FORMER.items():
        sections.setdefault(section, []).append(f"{key}: {json.dumps(value)}")
    given = "".join(f"{section}:\n  " + "\n  ".join(lines) + "\n" for section, lines in sections.items())
    other = "".join(line for line in BASE.splitlines(True) if line.split(":")[0] not in sections)
    path.write_text(other + given.replace("data:", "data:\n  train: {demo: train}"), encoding="utf-8")
    plain = load_config(written(path.with_name("plain.yaml")), ["training.max_steps=100000"])
    assert load_config(path) == plain
    overrides = [f"{section}.{key}={json.dumps(value)}" for (section, key), value in FORMER.items()]
    assert load_config(path.with_name("plain.yaml"), ["training.max_steps=100000", *overrides]) == plain


def test_every_other_value_is_refused_at_once_with_its_place(path: Path) -> None:
    written(path, "divergence: {patience_steps: 5}\ncheckpoints: {save_attempts: null}\nmodel: {d_modl: 3}\n")
    overrides = (
        "training.dry_run=false",
        "training.threads_per_rank=4",
        "data.stall_seconds=60",
        "decoding.top_k=5",
        "decoding.no_repeat_ngram_size=3",
        "validation.comet=Unbabel/wmt22-comet-da",
    )
    assert problems_of(path, *overrides) == [
        f"{path}:4: divergence.patience_steps: is no setting any more: it is always 20. Remove it",
        f"{path}:5: checkpoints.save_attempts: is no setting any more: it is always 3. Remove it",
        "command line: data.stall_seconds=60: data.stall_seconds: is no setting any more: it is always half of "
        "training.hang_seconds. Remove it",
        "command line: validation.comet=Unbabel/wmt22-comet-da: validation.comet: is no setting any more: write "
        "validation.plugin: examples/comet_score.py:score, a file in which you name the model (docs/plugins.md)",
        "command line: decoding.top_k=5: decoding.top_k: is no setting any more: give `translate` the option --top-k. "
        "Remove it here",
        "command line: decoding.no_repeat_ngram_size=3: decoding.no_repeat_ngram_size: is no setting any more: give "
        "`translate` the option --no-repeat-ngram. Remove it here",
        "command line: training.dry_run=false: training.dry_run: is no setting any more: it is always made. Remove it",
        "command line: training.threads_per_rank=4: training.threads_per_rank: is no setting any more: set the variable "
        "OMP_NUM_THREADS, in a job by slurm.environment. Remove it here",
        f"{path}:6: model.d_modl: no such key; did you mean `d_model`?",
    ]


def test_an_override_mends_what_an_old_file_gives(path: Path) -> None:
    written(path, "divergence: {patience_steps: 5}\n")
    assert load_config(path, ["divergence.patience_steps=20"]) == load_config(written(path))


def test_options_of_slurm_are_refused_with_what_replaces_them(path: Path) -> None:
    written(
        path,
        "slurm: {partition: gpu, memory: 10G, cpu_bind: none, extra_sbatch: [--exclusive], extra_srun: [--mpi=x]}\n",
    )
    gone = "is no setting any more: write"
    assert problems_of(path) == [
        f"{path}:4: slurm.partition: {gone} slurm.sbatch: {{partition: ...}}",
        f"{path}:4: slurm.memory: {gone} slurm.sbatch: {{mem: ...}}",
        f"{path}:4: slurm.cpu_bind: {gone} slurm.srun: {{cpu-bind: ...}}",
        f"{path}:4: slurm.extra_sbatch: {gone} slurm.sbatch: {{option: value}}",
        f"{path}:4: slurm.extra_srun: {gone} slurm.srun: {{option: value}}",
    ]


def test_a_profile_of_an_earlier_version_is_read_or_refused(path: Path) -> None:
    path.write_text("nodes: 2\npreflight_seconds: 180\n")
    assert load_profile(str(path)) == {"nodes": 2}
    path.write_text("nodes: 2\npreflight_tolerance: 0.5\n")
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path))
    assert caught.value.problems == [
        f"{path}:2: slurm.preflight_tolerance: is no setting any more: it is always 0.8. Remove it"
    ]


def test_the_settings_that_a_checkpoint_kept_are_those_of_today(path: Path) -> None:
    kept = load_config(written(path)).model_dump(mode="json")
    for (section, key), value in FORMER.items():
        kept[section][key] = value
    kept["divergence"]["patience_steps"] = 5  # what only the earlier version could do
    kept["slurm"]["partition"] = "gpu"
    assert Config.model_validate(current_settings(kept)) == load_config(path)
