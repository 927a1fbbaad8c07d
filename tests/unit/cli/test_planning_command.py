"""The command `plan`: its tables, its JSON, its mistakes, and what it does not import."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.errors import UserError

ROW_KEYS = {
    *("nodes", "ranks", "fits", "problem", "warnings", "max_tokens", "largest_micro_batch", "memory_bytes"),
    *("memory_parts_bytes", "memory_moments_bytes", "memory_bytes_by_zero_stage", "cpu_memory_bytes"),
    *("micro_batches_per_rank", "tokens_per_second", "step_seconds", "compute_seconds", "communication_seconds"),
    *("update_seconds", "idle_share", "efficiency", "hours", "node_hours"),
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {lanes: 16, train: {demo: train}}\ntraining: {max_steps: 10000}\nslurm: {ranks_per_node: 8}\n",
        encoding="utf-8",
    )
    return str(path)


def plan(*arguments):
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_json_has_the_same_keys_for_every_number_of_nodes(config):
    values = json.loads(plan(config, "--nodes", "4,1,2,1", "--json").stdout)
    assert [row["nodes"] for row in values["plans"]] == [1, 2, 4]
    assert all(set(row) == ROW_KEYS for row in values["plans"])
    assert [row["fits"] for row in values["plans"]] == [True, True, False]
    assert values["plans"][2]["step_seconds"] is None
    first = values["plans"][0]
    parts = [first[f"{part}_seconds"] for part in ("compute", "communication", "update")]
    assert first["step_seconds"] == pytest.approx(sum(parts))
    assert first["memory_bytes"] == max(first["memory_moments_bytes"].values())
    assert first["memory_bytes"] == first["memory_bytes_by_zero_stage"]["1"]
    assert set(values["hardware"]["half_tflops"]) == {"value", "source"}


def test_the_tables_have_a_line_for_each_number_of_nodes_and_say_where_figures_come_from(config):
    lines = plan(config, "--nodes", "1,4").stdout.splitlines()
    tables = [number for number, line in enumerate(lines) if line.split()[:1] == ["nodes"]]
    assert len(tables) == 2
    for table in tables:
        assert [line.split()[0] for line in lines[table + 1 : table + 3]] == ["1", "4"]
        assert len({len(line) for line in lines[table : table + 3]}) == 1
    assert any(line.startswith("4 nodes: more ranks (32) than data.lanes (16)") for line in lines)
    assert any(line.startswith("vendor's data sheet: memory_gb 141") for line in lines)
    assert lines[-1].startswith("computed: all in the tables")
    assert any(line.startswith("assumed: ") and "mean_sentence_tokens 32" in line for line in lines)
    assert not any(line.startswith("measured by preflight") for line in lines)


def test_ranks_of_a_node_are_those_of_the_file_else_of_its_profile_unless_they_are_given(config, tmp_path):
    def ranks(path, *options):
        return json.loads(plan(str(path), "--nodes", "1", "--json", *options).stdout)["plans"][0]["ranks"]

    profile, run = tmp_path / "site.yaml", tmp_path / "other.yaml"
    profile.write_text("ranks_per_node: 4\n", encoding="utf-8")
    run.write_text(f"data: {{train: {{demo: train}}}}\nslurm: {{cluster: {profile}}}\n", encoding="utf-8")
    assert (ranks(config), ranks(run), ranks(run, "--gpus-per-node", "2")) == (8, 4, 2)


def test_too_few_lanes_are_not_said_to_be_too_little_memory(config):
    def fits(*options):
        lines = plan(config, "--nodes", "1,4", *options).stdout.splitlines()
        return [line.split()[4] for line in lines[2:4]]

    assert fits() == ["yes", "lanes"]
    assert fits("data.max_tokens=40000000") == ["no", "no"]


def test_a_calibrated_plan_says_what_was_measured(config, tmp_path):
    report = tmp_path / "report.json"
    values = {"medians": {"matmul_tflops": 123.0}, "nodes": {"n1": {}}, "num_ranks": 8, "device": "cuda"}
    report.write_text(json.dumps(values), encoding="utf-8")
    printed = plan(config, "--calibrate", str(report)).stdout
    assert "measured by preflight: half_tflops 123" in printed


def test_a_precision_that_is_left_open_is_planned_as_that_of_gpus(config):
    left_open, given = (plan(config, "--json", f"training.precision={name}").stdout for name in ("auto", "fp16"))
    assert left_open == given
    assert json.loads(given)["precision"] == "fp16"


def test_a_precision_that_is_left_open_is_planned_for_cpus_as_train_takes_it_there(config):
    left_open, given = (
        plan(config, "--gpu", "cpu", "--json", f"training.precision={name}").stdout for name in ("auto", "fp32")
    )
    assert left_open == given
    assert json.loads(given)["precision"] == "fp32"


def test_what_a_person_measured_is_planned_with_and_said(config):
    options = ("--nodes", "1,2", "--tokens-per-second", "2000", "--all-reduce-gb-per-second", "4")
    values = json.loads(plan(config, *options, "--json", "training.precision=fp32").stdout)
    assert values["hardware"]["network_gb_per_second"] == {"value": 0.5, "source": "given"}
    one, two = values["plans"]
    step_tokens = one["tokens_per_second"] * one["step_seconds"]
    assert one["compute_seconds"] == pytest.approx(step_tokens / (8 * 2000))
    assert two["communication_seconds"] > 10 * one["communication_seconds"]
    assert one["efficiency"] == pytest.approx(one["compute_seconds"] / one["step_seconds"])
    assert any(line.startswith("given: half_tflops") for line in plan(config, *options).stdout.splitlines())


def test_overrides_change_the_plan(config):
    def memory(*overrides):
        return json.loads(plan(config, *overrides, "--nodes", "1", "--json").stdout)["plans"][0]["memory_bytes"]

    assert memory("training.activation_checkpointing=true") < memory() < memory("data.max_tokens=32768")


@pytest.mark.parametrize("nodes", ["0", "1,", "-1", "1-4", "two", "1;2", "1.5", "²", "1000000"])
def test_numbers_of_nodes_that_are_none_are_refused(config, nodes):
    with pytest.raises(UserError, match="--nodes: expected whole numbers from 1") as raised:
        plan(config, f"--nodes={nodes}")
    assert raised.value.exit_code == 2


def test_other_mistakes_end_in_a_message_and_exit_code_2(config, tmp_path):
    with pytest.raises(UserError, match="--gpu: expected one of"):
        plan(config, "--gpu", "tpu")
    with pytest.raises(UserError, match="modle"):
        plan(config, "modle.preset=big")
    assert plan(config, "--gpus-per-node", "0").exit_code == 2


def test_a_plan_needs_no_torch(config):
    program = (
        "import sys; from dist_transformer.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "print(sorted({'torch', 'deepspeed', 'datasets', 'mlflow'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, "plan", config, "--nodes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
