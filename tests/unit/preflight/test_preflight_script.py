"""launch/preflight.sh with a Slurm that is played by two small scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import NOT_INHERITED, without

from dist_transformer.files import read_json, write_json

SCRIPT = Path(__file__).resolve().parents[3] / "launch" / "preflight.sh"
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$SEEN"
echo "${DIST_TRANSFORMER_FIRST_EXIT-unset} $MASTER_ADDR $MASTER_PORT" >> "$SEEN"
while [ $# -gt 0 ]; do case $1 in --folder) folder=$2;; esac; shift; done
if [ -n "$RANKS" ]; then cp "$RANKS"/* "$folder"; fi
exit 1
"""


@pytest.fixture
def run_script(tmp_path):
    """Runs it for the nodes n1, n2, n3, with the files that the ranks would write; returns exit code and output."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n")):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)

    def run(*options: str, ranks: Path | None = None) -> tuple[int, str]:
        environment = {
            **without(NOT_INHERITED),
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SEEN": str(tmp_path / "seen"),
            "RANKS": str(ranks or ""),
            "MASTER_PORT": "12000",
            "DIST_TRANSFORMER_FIRST_EXIT": str(tmp_path / "first_exit"),
        }
        arguments = [sys.executable, str(tmp_path), str(tmp_path / "odd $(name) of it"), "20", "0.8", *options]
        command = [str(SCRIPT), *arguments]
        done = subprocess.run(
            command, env=environment, cwd=SCRIPT.parents[1], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


def write_ranks(folder: Path, speeds: list[float]) -> Path:
    for rank, speed in enumerate(speeds):
        record = {"rank": rank, "node": f"n{rank + 1}", "num_ranks": 3, "ranks_per_node": 1, "device": "cpu"}
        rest = {"measures": {"matmul_tflops": speed}, "versions": {}, "warnings": [], "together": "done"}
        write_json(folder / f"rank_{rank}.json", {**record, **rest})
    return folder


def test_nodes_to_exclude_are_exit_code_3_and_a_file_whatever_srun_says(tmp_path, run_script):
    code, out = run_script(
        "--mem=1 G", "--", "apptainer", "exec", "my image", ranks=write_ranks(tmp_path / "r", [5, 1, 5])
    )
    assert (code, out.splitlines()[-1]) == (3, "--exclude=n2")
    folder = tmp_path / "odd $(name) of it"
    assert (folder / "exclude").read_text(encoding="utf-8") == "n2\n"
    seen = (tmp_path / "seen").read_text(encoding="utf-8").splitlines()
    prefix = ["--mem=1 G", "apptainer", "exec", "my image", str(SCRIPT.parent / "slurm_task.sh"), "preflight"]
    assert seen[seen.index("--mem=1 G") :][: len(prefix)] == prefix
    assert "--kill-on-bad-exit=0" in seen
    assert seen[seen.index("--seconds") + 1] == "20"
    # Not the trainer's port, and what ends here is no failure of the training.
    assert seen[-1] == "unset n1 12003"


def test_good_nodes_are_exit_code_0_and_a_silent_one_is_found_by_its_name(tmp_path, run_script):
    assert run_script(ranks=write_ranks(tmp_path / "all", [5, 5, 5]))[0] == 0
    code, out = run_script("--", ranks=write_ranks(tmp_path / "two", [5, 5]))
    assert code == 3
    assert "n3: wrote nothing within the time limit" in out


def test_files_of_an_earlier_preflight_do_not_count(tmp_path, run_script):
    assert run_script(ranks=write_ranks(tmp_path / "r", [5, 1, 5]))[0] == 3
    code, out = run_script()
    assert (code, "no rank wrote a file" in out) == (1, True)
    folder = tmp_path / "odd $(name) of it"
    assert not (folder / "exclude").exists()
    assert read_json(folder / "report.json")["complete"] is False
