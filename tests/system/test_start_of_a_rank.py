"""What a rank imports: each of these modules would cost every rank about a CPU second and tens of megabytes."""

import re
import subprocess
import sys

import pytest
from running import NOT_INHERITED, without

pytestmark = pytest.mark.slow

NEEDLESS = {"mlflow.tracking", "pandas", "sympy", "torch._dynamo", "torch._inductor", "datasets", "transformers"}


def imports_of(folder, *arguments: str) -> set[str]:
    """The modules that a command imported in its own process."""
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dist_transformer", *arguments],
        cwd=folder, env=without(NOT_INHERITED), capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    return set(re.findall(r"^import time:.*\| +(\S+)$", ran.stderr, re.MULTILINE))


def test_a_rank_that_is_named_in_part_ends_with_one_message(command):
    for verb in (("train", "small.yaml"), ("preflight",)):
        said = command(*verb, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29400", code=2)
        assert "got RANK=0, WORLD_SIZE=1, no LOCAL_RANK, MASTER_ADDR=127.0.0.1" in said
        assert "Traceback" not in said
    assert not (command.folder / "runs").exists()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_to_its_model_folder_imports_neither_a_compiler_nor_what_only_others_use(command, stage):
    command("prepare", "small.yaml")  # which needs some of them
    arguments = ("train", "small.yaml", f"run.name=imports_{stage}", f"training.zero_stage={stage}")
    imported = imports_of(command.folder, *arguments)
    assert {"torch", "deepspeed", "pyarrow"} <= imported
    assert (command.folder / "runs" / f"imports_{stage}" / "model").is_dir()
    assert imported & NEEDLESS == set()
