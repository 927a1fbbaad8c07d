"""A start says where it comes from: from which run its folder was copied."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dist_transformer.config.schema import Config
from dist_transformer.distributed.group import Ranks
from dist_transformer.files import write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training.changed_settings import compare_and_report, settings_of
from dist_transformer.training.checkpoint.checkpoints import Checkpoint


def config_of(run_dir: RunDir, **tracking: bool) -> Config:
    settings: dict[str, Any] = {"data": {"train": {"demo": "train"}}, "tracking": tracking}
    return Config(**settings, run={"name": run_dir.name, "root": str(run_dir.path.parent)})


@pytest.mark.parametrize("is_named", [True, False], ids=["by its name", "as a folder"])
def test_training_on_a_copy_of_a_run_is_told_as_both_are_one_run_in_mlflow(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_named: bool
) -> None:
    original, copied = RunDir(tmp_path / "runs" / "original"), RunDir(tmp_path / "mine" / "copied")
    write_json(original.state, {"run_id": "1234", "state": "stopped"})
    shutil.copytree(original.path, copied.path)
    (tmp_path / "link").symlink_to(original.path)
    checkpoint = Checkpoint(original.checkpoints, {"step": 3, "settings": settings_of(config_of(original), None)})

    def said(run_dir: RunDir, config: Config, run_id: str = "1234") -> str:
        caplog.clear()
        data = SimpleNamespace(folder=None)
        run = SimpleNamespace(run_dir=run_dir, config=config, ranks=ranks, run_id=run_id, data=data)
        compare_and_report(run, checkpoint)  # type: ignore[arg-type]
        return "".join(record.message for record in caplog.records if record.levelname == "WARNING")

    config = config_of(copied if is_named else original)
    assert f"a copy of {original.path}: both are one run in MLflow" in said(copied, config)
    assert not said(copied, config_of(copied, enabled=False))
    assert not said(original, config_of(original))
    assert not said(RunDir(tmp_path / "link"), config_of(original)), "the same folder by another path"
    assert not said(copied, config, run_id="5678"), "another run has taken the place of the first"
    shutil.rmtree(original.path)
    assert not said(copied, config), "it was moved"
