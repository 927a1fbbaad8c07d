"""The report: from the files of the ranks that got so far, by a Python that needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.errors import UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.preflight.report import main, rank_file


def write_rank(folder: Path, rank: int, tflops: float, together: str = "done") -> None:
    write_json(
        rank_file(folder, rank),
        {
            "rank": rank,
            "node": f"n{rank + 1}",
            "num_ranks": 4,
            "ranks_per_node": 1,
            "device": "cpu",
            "measures": {"matmul_tflops": tflops},
            "versions": {},
            "warnings": [],
            "together": together,
        },
    )


def test_a_slow_node_is_named_against_the_median_and_can_be_pasted(tmp_path, capsys):
    for rank, tflops in enumerate((57.0, 12.0, 57.5, 56.0)):
        write_rank(tmp_path, rank, tflops)
    assert main([str(tmp_path), "0.8", "n1", "n2", "n3", "n4"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert "n2: matmul 0.21 of the median (12 of 57 TFLOP/s)" in lines
    assert lines[-1] == "--exclude=n2"
    assert (tmp_path / "exclude").read_text(encoding="utf-8") == "n2\n"
    report = read_json(tmp_path / "report.json")
    assert set(report) >= {"nodes", "medians", "outliers", "silent", "warnings", "exclude", "complete"}
    (outlier,) = report["outliers"]
    assert (outlier["node"], outlier["measure"], outlier["value"], outlier["median"]) == ("n2", "matmul_tflops", 12, 57)
    assert outlier["ratio"] == 12 / 57
    assert (report["medians"]["matmul_tflops"], report["complete"]) == (57, True)


def test_a_step_that_did_not_end_is_judged_from_the_files_there_are(tmp_path, capsys):
    for rank in (0, 1, 3):
        write_rank(tmp_path, rank, 50.0, together="Timed out after 20 seconds")
    (tmp_path / ".rank_2.json.77.tmp").write_text("{", encoding="utf-8")  # killed while it wrote
    assert main([str(tmp_path), "0.8", "n1", "n2", "n3", "n4"]) == 3
    text = capsys.readouterr().out
    assert "n3: wrote nothing within the time limit" in text
    assert "warning: rank 0, 1, 3: Timed out after 20 seconds" in text
    assert "not complete" in text
    report = read_json(tmp_path / "report.json")
    assert (report["silent"], report["exclude"], report["complete"]) == (["n3"], ["n3"], False)


def test_equal_nodes_exit_with_0_and_leave_no_exclude_file(tmp_path, capsys):
    for rank in range(4):
        write_rank(tmp_path, rank, 50.0)
    assert main([str(tmp_path), "0.8"]) == 0
    assert "no node stands out" in capsys.readouterr().out
    assert not (tmp_path / "exclude").exists()


def test_a_step_in_which_no_rank_wrote_could_not_be_run(tmp_path, capsys):
    assert main([str(tmp_path), "0.8", "n1"]) == 1
    assert f"no rank wrote a file into {tmp_path}" in capsys.readouterr().err
    assert read_json(tmp_path / "report.json")["exclude"] == []


@pytest.mark.parametrize("arguments", [[], ["folder"], ["folder", "much"]])
def test_wrong_arguments_are_a_message(arguments, capsys):
    assert main(arguments) == 2
    assert "expected: FOLDER TOLERANCE [NODE ...]" in capsys.readouterr().err


def test_the_batch_scripts_python_needs_no_torch(tmp_path):
    write_rank(tmp_path, 0, 50.0)
    code = (
        "import json, sys; from dist_transformer.preflight.report import main; main(sys.argv[1:]);"
        "print(json.dumps([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "0.8"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(out.splitlines()[-1]) == []


def test_only_whole_files_of_ranks_are_read(tmp_path):
    write_rank(tmp_path, 3, 50.0)
    (tmp_path / "report.json").write_text("{}", encoding="utf-8")
    main([str(tmp_path), "0.8"])
    assert [*read_json(tmp_path / "report.json")["nodes"]] == ["n4"]


@pytest.mark.parametrize("given", ["nan", "inf", "0", "-0.5", "1.1"])
def test_a_tolerance_that_is_no_share_is_refused_before_anything_is_measured(tmp_path: Path, given: str) -> None:
    refusal = CliRunner().invoke(app, ["preflight", "--folder", str(tmp_path / "new"), "--tolerance", given]).exception
    assert isinstance(refusal, UserError)
    assert f"--tolerance: expected a share above 0 and at most 1, got {given};" in str(refusal)
    assert not (tmp_path / "new").exists()
