"""Many runs as one job array: the file, the points, the folders, what is submitted again, the table."""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import FakeSlurm, small_snapshot
from fake_slurm import job_line
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.cli import sweep as sweep_module
from dist_transformer.cli.status import list_command
from dist_transformer.cli.submit import submit_run
from dist_transformer.cli.sweep import submit_points
from dist_transformer.cluster import submit, sweep_submit
from dist_transformer.cluster.submit import note_job
from dist_transformer.cluster.sweep import ranges, read_sweep
from dist_transformer.config.loading import load_config
from dist_transformer.errors import ConfigError, UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.sweep_folder import SweepDir, read_sweep_state, sweep_of

GRID = "grid:\n  optimizer.learning_rate: [1e-3, 3e-4]\n  model.dropout: [0.1, 0.3]\n"


@pytest.fixture(autouse=True)
def quick_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (submit, sweep_submit):
        monkeypatch.setattr(module, "take_snapshot", small_snapshot)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{name: swept, root: {tmp_path}/runs}}\ndata: {{train: {{demo: train}}}}\n"
        "model: {preset: tiny}\ntokenizer: {vocabulary_size: 500}\n"
    )
    return path


@pytest.fixture
def folder(config: Path) -> SweepDir:
    return SweepDir(config.parent / "runs" / "swept")


def _file(config: Path, text: str) -> Path:
    path = config.parent / "sweep.yaml"
    path.write_text(text)
    return path


def _submit(config: Path, text: str, overrides: Sequence[str] = (), max_running: int | None = None) -> None:
    submit_points(config, list(overrides), _file(config, text), max_running)


def _settings(config: Path, text: str) -> list[dict[str, Any]]:
    return read_sweep(_file(config, text)).settings


def _lines(states: dict[str, str]) -> str:
    """Of squeue."""
    return "".join(f"{job_line(job_id, state)}\n" for job_id, state in states.items())


def _say(run_dir: RunDir, state: str) -> None:
    write_json(run_dir.state, {"state": state, "step": 7})


# ----------------------------------------------------------------------------------------------------------- the file


def test_a_grid_is_every_combination_with_the_last_key_fastest(config: Path) -> None:
    assert _settings(config, GRID) == [
        {"optimizer.learning_rate": rate, "model.dropout": dropout}
        for rate, dropout in itertools.product([1e-3, 3e-4], [0.1, 0.3])
    ]


def test_a_list_is_crossed_with_the_grid_and_either_stands_alone(config: Path) -> None:
    listed = "list:\n  - {model.num_heads: 1, model.d_model: 256}\n  - {model.num_heads: 2}\n"
    entries = [{"model.num_heads": 1, "model.d_model": 256}, {"model.num_heads": 2}]
    assert _settings(config, listed) == entries
    crossed = [{**entry, "run.seed": seed} for entry in entries for seed in (1, 2, 3)]
    assert _settings(config, listed + "grid: {run.seed: [1, 2, 3]}\n") == crossed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "sweep.yaml:1: a sweep needs `grid` or `list`"),
        ("grid: {}", "sweep.yaml:1: a sweep needs `grid` or `list`"),
        (
            "gird: {run.seed: [1]}\nlist: [{run.seed: 1}]",
            "sweep.yaml:1: gird: no such key in a sweep file; known: grid",
        ),
        ("grid: [1]", "sweep.yaml:1: grid: expected `section.key: [value, value]` lines"),
        ("grid:\n  run.seed: 1e3", "sweep.yaml:2: grid: run.seed: expected a list of values, got '1e3'"),
        ("grid: {run.seed: []}", "sweep.yaml:1: grid: run.seed: expected a list of values, got []"),
        ("grid:\n\n  seed: [1]", "sweep.yaml:3: grid: seed: expected section.key"),
        ("list: {run.seed: 1}", "sweep.yaml:1: list: expected `- {section.key: value}` lines"),
        ("list: []", "sweep.yaml:1: a sweep needs `grid` or `list`"),
        ("grid: {run.seed: [1]}\nlist: []", "sweep.yaml:2: list: expected `- {section.key: value}` lines"),
        ("list:\n- 5", "sweep.yaml:2: list: expected {section.key: value}, got '5'"),
        ("list:\n- run.name: a", "sweep.yaml:2: list: run.name: is the same for all points"),
        ("grid: {slurm.nodes: [1, 2]}", "sweep.yaml:1: grid: slurm.nodes: is the same for all points"),
        ("grid: {run.seed: [1]}\nlist: [{run.seed: 2}]", "sweep.yaml:2: list: run.seed: stands in the grid too"),
        ("grid: {run.seed: [1]}\nmax_running: 0", "sweep.yaml:2: max_running: expected a whole number from 1, got 0"),
        ("grid: {run.seed: [1]}\nmax_running: true", "max_running: expected a whole number from 1, got True"),
        ("grid: {run.seed: [1, 2, 1]}", "sweep.yaml: tasks 0 and 2 are the same point (run.seed=1); keep one"),
        ("grid: {run.seed: [1, 1", "sweep.yaml:1: not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_line(config: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sweep(_file(config, text))
    assert problem in str(caught.value)


def test_more_points_than_a_job_array_takes_are_refused_without_making_them(config: Path) -> None:
    axes = "".join(f"  model.key{n}: [{', '.join(map(str, range(100)))}]\n" for n in range(8))
    with pytest.raises(ConfigError, match="more than 1000 points"):
        read_sweep(_file(config, f"grid:\n{axes}"))


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_exactly_the_tasks(tasks: set[int]) -> None:
    text = ranges(sorted(tasks))
    parts = [part.split("-") for part in text.split(",") if part]
    named = [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]
    assert named == sorted(tasks)
    assert all(int(a[-1]) + 1 < int(b[0]) for a, b in itertools.pairwise(parts))  # as short as can be


# ---------------------------------------------------------------------------------------------------------- the points


def test_every_point_is_a_run_folder_whose_configuration_has_its_settings(
    config: Path, folder: SweepDir, fake_slurm: FakeSlurm
) -> None:
    _submit(config, GRID, ["training.max_steps=9000"])
    for task, point in enumerate(_settings(config, GRID)):
        kept = load_config(folder.task(task).config)
        assert (kept.optimizer.learning_rate, kept.model.dropout, kept.training.max_steps) == (*point.values(), 9000)
        assert Path(kept.run.root) / kept.run.name == folder.task(task).path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("tracking.experiment", text)
            for text in ('"1e3"', "1e3", "1_000", '"true"', '"a: b"', '"it\'s"', '"$(x)"', "日本")
        ),
        *(("training.freeze", text) for text in ("['*[q ]*', e*]", "['*1*', '[#xe]*']", "[]")),
        *(("optimizer.learning_rate", text) for text in ("1e-5", "null", "3")),
        ("data.filters", "{max_tokens: 1_00}"),
        ("training.init_partially", "false"),
    ],
)
def test_a_value_means_in_a_sweep_what_it_means_in_a_configuration(config: Path, key: str, value: str) -> None:
    [point] = read_sweep(_file(config, f"list: [{{{key}: {value}}}]")).points
    section, name = key.split(".")
    other = {"data": "train: {demo: train}, "} if section == "data" else {}
    written = config.parent / "written.yaml"
    written.write_text(f"extends: plain.yaml\n{section}: {{{other.get(section, '')}{name}: {value}}}\n")
    plain = config.parent / "plain.yaml"
    plain.write_text("data: {train: {demo: train}}\n")
    assert load_config(plain, settings=point) == load_config(written)


def test_the_problems_of_all_points_are_told_together_each_once_with_its_tasks_and_line(
    config: Path, fake_slurm: FakeSlurm
) -> None:
    text = "grid:\n  model.num_heads: [3, 4]\n  optimizer.beta1: [0.5, 7]\n  optimizer.beta: [1]\n"
    with pytest.raises(ConfigError) as caught:
        _submit(config, text)
    place = f"{config.parent}/sweep.yaml"
    problems = sorted(caught.value.problems)
    assert problems[0].startswith(f"{place}:4: optimizer.beta: no such key")
    assert problems[1].startswith(f"tasks 0-1: {place}:2: model.num_heads: 3 heads do not divide d_model 128")
    assert problems[2].startswith(f"tasks 1,3: {place}:3: optimizer.beta1: ")
    assert len(problems) == 3
    assert fake_slurm.calls == []
    assert not (config.parent / "runs").exists()


def test_what_slurm_would_refuse_is_told_once_for_all_points(config: Path, fake_slurm: FakeSlurm) -> None:
    with pytest.raises(ConfigError) as caught:
        _submit(config, GRID, ["slurm.ranks_per_node=2", "slurm.gpus_per_node=1", "slurm.time_limit='1:00'"])
    gpus, time_limit = caught.value.problems
    assert gpus.startswith("slurm.gpus_per_node: 1 GPUs for 2 ranks")
    assert time_limit.startswith("slurm.time_limit: 1:00 is 60 s")


def test_the_disk_must_hold_the_checkpoints_of_all_points(
    config: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "num_parameters_of", lambda given: 10**14)
    with pytest.raises(ConfigError, match=rf"its checkpoints will take {4 * 10**14 * 12 * 9 / 1e9:.1f} GB"):
        _submit(config, GRID)


# ------------------------------------------------------------------------------------------------------ the submission


def test_one_array_is_submitted_with_a_folder_a_log_and_a_comment_for_each_task(
    config: Path, folder: SweepDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    _submit(config, GRID + "max_running: 3\n")
    [call] = fake_slurm.calls
    task = f"{folder.path}/task_%a"
    assert call[-2:] == [str(folder.common.submitted_script), task]
    assert {"--array=0-3%3", f"--output={task}/slurm/job-%A_%a.log", f"--comment=dist-transformer:{task}"} <= {*call}
    for number in range(4):
        assert folder.task(number).slurm.is_dir()  # the folder of the log, which sbatch does not make
        assert read_json(folder.task(number).job)["job_id"] == f"4711_{number}"
    assert f"\ncode={folder.common.snapshot}\n" in folder.common.submitted_script.read_text()
    assert (folder.common.snapshot / "dist_transformer").is_dir()
    assert not folder.task(0).snapshot.exists()
    assert folder.file.read_text() == GRID + "max_running: 3\n"
    assert capsys.readouterr().out.startswith(
        f"submitted job array 4711 of 4 runs, 3 at once; sweep folder {folder.path}\n"
    )


def test_the_option_goes_before_the_file_and_without_either_all_run_at_once(
    config: Path, fake_slurm: FakeSlurm
) -> None:
    _submit(config, GRID + "max_running: 3\n", max_running=2)
    _submit(config, GRID, ["run.name=other"])
    assert "--array=0-3%2" in fake_slurm.calls[0]
    assert "--array=0-3" in fake_slurm.calls[1]


def test_the_prepared_corpora_are_those_of_the_runs_beside_the_sweep(
    config: Path, folder: SweepDir, fake_slurm: FakeSlurm
) -> None:
    _submit(config, GRID)
    (folder.prepared / "made_by_a_point").mkdir()
    assert (folder.path.parent / "prepared" / "made_by_a_point").is_dir()


def test_in_a_container_the_ranks_see_what_the_sweep_shares_also_when_a_point_is_submitted_on_its_own(
    config: Path, folder: SweepDir, fake_slurm: FakeSlurm
) -> None:
    _submit(config, GRID, ["slurm.container_image=image"])
    mount = f"--container-mounts={folder.path.parent}:{folder.path.parent}"
    assert mount in folder.common.submitted_script.read_text()
    fake_slurm.set_jobs(job_line("4711_0", "FAILED") + "\n")
    submit_run(folder.task(0).path, [])
    assert mount in folder.task(0).submitted_script.read_text()


def test_submitted_again_the_array_has_only_what_is_neither_finished_nor_under_work(
    config: Path, folder: SweepDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    _submit(config, GRID)
    uid = read_json(folder.state)["uid"]
    for task, state in enumerate(("failed", "finished", "running", "stopped")):
        _say(folder.task(task), state)
    fake_slurm.set_jobs(_lines({"4711_0": "FAILED", "4711_2": "RUNNING", "4711_3": "FAILED"}))
    mark = folder.common.snapshot / "mark"
    mark.write_text("")
    capsys.readouterr()
    _submit(config, GRID)
    assert "--array=0,3" in fake_slurm.calls[1]
    told = capsys.readouterr().out
    assert "task 1: left out: finished\ntask 2: left out: job 4711_2 works on it (RUNNING)\nsubmitted" in told
    state = read_sweep_state(folder)
    assert state is not None
    assert state.uid == uid
    jobs = [read_json(folder.task(task).job)["job_id"] for task in range(4)]
    assert jobs == ["4712_0", "4711_1", "4711_2", "4712_3"]
    assert mark.exists()  # what runs keeps its code
    assert re.search(
        r"^code:   as of 2\d{3}-\d\d-\d\d \d\d:\d\d, since task 2 still runs with it; ", told, re.MULTILINE
    )
    fake_slurm.set_jobs("")
    _submit(config, GRID)
    assert "--array=0,2-3" in fake_slurm.calls[2]
    assert not mark.exists()
    assert "code:" not in capsys.readouterr().out


def test_however_many_points_there_are_slurm_is_asked_once(
    config: Path, folder: SweepDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    _submit(config, GRID)
    _say(folder.task(1), "finished")
    asked = fake_slurm.folder / "asked"
    fake_slurm.program("squeue", f'echo "$*" >> {asked}')
    for ask in (lambda: _submit(config, GRID), lambda: list_command(folder.path)):
        asked.write_text("")
        ask()
        [call] = asked.read_text().splitlines()
        assert re.search(r"--jobs=471\d_0,471\d_2,471\d_3 ", call)


def test_a_point_that_was_submitted_on_its_own_since_is_left_to_that_job(
    config: Path, folder: SweepDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    _submit(config, GRID)
    note_job(folder.task(1), {"train": "9000"}, "")
    fake_slurm.set_jobs(job_line("9000", "PENDING", "Priority"))
    _submit(config, GRID)
    assert "--array=0,2-3" in fake_slurm.calls[1]
    list_command(folder.path)
    assert "9000 PENDING" in capsys.readouterr().out


def test_a_sweep_of_which_all_is_done_is_not_submitted(
    config: Path, folder: SweepDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    _submit(config, GRID)
    for task in range(4):
        _say(folder.task(task), "finished")
    _submit(config, GRID)
    assert len(fake_slurm.calls) == 1
    assert capsys.readouterr().out.endswith(f"nothing to submit; sweep folder {folder.path}\n")


def test_points_may_be_added_behind_the_others_but_not_changed(
    config: Path, folder: SweepDir, fake_slurm: FakeSlurm
) -> None:
    _submit(config, "grid: {run.seed: [1, 2]}")
    for task in range(2):
        _say(folder.task(task), "finished")
    _submit(config, "grid: {run.seed: [1, 2, 3]}")
    assert "--array=2" in fake_slurm.calls[1]
    for other in ("[2, 1, 3]", "[1]", "[1, 3, 2]"):
        with pytest.raises(ConfigError, match=r"holds a sweep of other points .*another run\.name"):
            _submit(config, f"grid: {{run.seed: {other}}}")


def test_the_folder_of_a_single_run_takes_no_sweep(config: Path, folder: SweepDir, fake_slurm: FakeSlurm) -> None:
    folder.path.mkdir(parents=True)
    folder.common.config.write_text("")
    with pytest.raises(ConfigError, match="is the folder of a single run; give the sweep another"):
        _submit(config, GRID)


def test_a_path_that_the_array_would_change_is_refused(config: Path, fake_slurm: FakeSlurm) -> None:
    with pytest.raises(ConfigError, match="a job array reads '%' in its arguments as a task number"):
        _submit(config, GRID, [f"run.root={config.parent}/50%a"])


def test_a_sweep_needs_a_yaml_file_below_it(config: Path) -> None:
    with pytest.raises(UserError, match="expected the YAML file that the points of a sweep are laid over"):
        submit_points(config.parent, [], _file(config, GRID), None)


def test_a_dry_run_shows_the_array_and_every_configuration_and_makes_nothing(
    config: Path, folder: SweepDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    submit_points(config, [], _file(config, GRID), None, dry_run=True)
    printed = capsys.readouterr().out
    assert "--array=0-3" in printed
    assert f"# {folder.task(3).config}\n" in printed
    assert not folder.path.exists()


def test_only_the_tasks_of_a_sweep_belong_to_it(config: Path, folder: SweepDir, fake_slurm: FakeSlurm) -> None:
    assert sweep_of(folder.task(0)) is None
    _submit(config, GRID)
    assert sweep_of(folder.task(0)) == folder
    assert sweep_of(RunDir(folder.path.parent / "task_0")) is None


# ------------------------------------------------------------------------------------------------------------ the table


def _trained(run_dir: RunDir, *losses: float | str) -> None:
    records = [{"event": "train", "step": 10 * n, "loss": 1.0 + n, "time": n} for n in range(1, 4)]
    records += [{"event": "validation", "step": 10 * n, "loss": loss, "time": n} for n, loss in enumerate(losses)]
    run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def submitted(config: Path, folder: SweepDir, fake_slurm: FakeSlurm) -> SweepDir:
    """Four points: worst, none yet, best, not a number."""
    _submit(config, GRID)
    _trained(folder.task(0), 2.0, 6.0)
    _trained(folder.task(2), 9.0, 5.0)
    _trained(folder.task(3), "nan")
    _say(folder.task(0), "finished")
    fake_slurm.set_jobs(
        "\n".join([job_line("4711_1", "PENDING", "Priority"), job_line("4711_2", "TIMEOUT", "TimeLimit")])
    )
    return folder


def test_the_runs_of_a_sweep_are_listed_by_validation_loss_with_the_settings_of_their_points(
    submitted: SweepDir, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    list_command(submitted.path)
    head, *rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert head[-2:] == ["validation loss", "settings"]
    assert [row[0] for row in rows] == ["task_2", "task_0", "task_1", "task_3"]
    assert rows[1][1:5] == ["finished", "4711_0", "30/100000", "4.0000"]
    assert rows[1][-2:] == ["6.0000", "optimizer.learning_rate=0.001, model.dropout=0.1"]
    assert [row[2] for row in rows] == ["4711_2 TIMEOUT", "4711_0", "4711_1 PENDING", "4711_3"]
    assert [row[-2] for row in rows] == ["5.0000", "6.0000", "-", "nan"]


def test_for_scripts_the_list_of_a_sweep_is_json(submitted: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    list_command(submitted.path, as_json=True)
    best = json.loads(capsys.readouterr().out)[0]
    assert (best["run"], best["validation_loss"]) == ("task_2", 5.0)
    assert best["overrides"] == {"optimizer.learning_rate": 3e-4, "model.dropout": 0.1}
