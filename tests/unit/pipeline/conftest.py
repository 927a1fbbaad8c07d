"""A folder with a pipeline of four nodes and their files."""

from pathlib import Path

import pytest
from pipeline_folder import CONFIG, FILE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("mono", "scores", "train.en", "train.de"):
        (tmp_path / name).write_text("1\n2\n")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "pipeline.yaml").write_text(FILE.format(root=tmp_path / "root", folder=tmp_path))
    return tmp_path
