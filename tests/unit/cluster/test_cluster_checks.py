"""What is refused before anything reaches Slurm; all problems are told at once."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import config_of

from dist_transformer.cluster.checks import memory_problems, start_problems, submission_problems
from dist_transformer.cluster.queue import seconds_of
from dist_transformer.cluster.submit import plan_submission
from dist_transformer.config.schema import Config, ModelConfig
from dist_transformer.errors import ConfigError
from dist_transformer.files import write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog


def _problems(run_dir: RunDir, num_parameters: int = 1000, **settings: object) -> list[str]:
    return submission_problems(config_of(**settings), run_dir, num_parameters)


def _record(run_dir: RunDir, seconds_a_step: float, save_seconds: float = 0.0, steps: int = 20) -> None:
    """metrics.jsonl of a run, with a day's pause in the middle and a torn last line."""
    write_json(run_dir.state, {"state": "stopped"})
    with run_dir.metrics.open("w") as file:
        for step in range(10, 10 * steps, 10):
            time = step * seconds_a_step + (86400 if step > 5 * steps else 0)
            record = {"event": "train", "step": step, "time": time, "save_seconds": save_seconds if step == 50 else 0.0}
            file.write(
                json.dumps(record) + "\n" + json.dumps({**record, "event": "validation", "time": time + 9}) + "\n"
            )
        file.write('{"event": "train", "st')


def test_a_sound_configuration_has_no_problems(run_dir: RunDir) -> None:
    sound = {
        "environment": {"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false"},
        "sbatch": {"nodelist": "n1", "mem": "10G", "exclusive": True},
    }
    assert _problems(run_dir, **sound) == []


def test_all_problems_are_reported_at_once(run_dir: RunDir) -> None:
    config = config_of(lanes=2, nodes=3, time_limit="2:00", sbatch={"X": True}, environment={"HF_TOKEN": "t"})
    config = config.model_copy(update={"model": ModelConfig(d_model=2**24)})  # for which no disk has room
    with pytest.raises(ConfigError) as caught:
        plan_submission(config, RunDir(run_dir.path.with_name("-run")), dry_run=True)
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize("name", ["-x", ".x", "a b", ["a", "$(b)"][-1], "ü", "a'b", "a\nb"])
def test_a_run_name_that_slurm_or_a_shell_could_misread_is_refused(tmp_path: Path, name: str) -> None:
    [problem] = [p for p in _problems(RunDir(tmp_path / name)) if p.startswith("run.name")]
    assert problem.startswith(f"run.name: {name!r}: expected letters, digits, '.', '_' and '-'")


@pytest.mark.parametrize("folder", ["a\\b", os.fsdecode(b"caf\xe9")])
def test_a_path_that_sbatch_cannot_write_its_log_to_is_refused(tmp_path: Path, folder: str) -> None:
    [problem] = _problems(RunDir(tmp_path / folder / "run"))
    assert "sbatch cannot write logs below a path with a backslash" in problem


def test_a_path_that_pythonpath_would_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the job would run other code than the snapshot in its run folder."""
    (tmp_path / "a:b").mkdir()
    monkeypatch.chdir(tmp_path / "a:b")
    for path in (tmp_path / "a:b" / "run", Path("run")):
        [problem] = _problems(RunDir(path))
        assert "PYTHONPATH, and that ends a path at ':'; choose a folder without it" in problem


def test_more_ranks_than_lanes_are_refused(run_dir: RunDir) -> None:
    [problem] = _problems(run_dir, lanes=7, nodes=2, ranks_per_node=4)
    assert problem.startswith("slurm.nodes: 2 nodes x 4 ranks = 8 ranks, more than data.lanes 7")


def test_fewer_gpus_than_ranks_are_refused_but_none_is_cpu_training(run_dir: RunDir) -> None:
    [problem] = _problems(run_dir, ranks_per_node=4, gpus_per_node=2)
    assert problem.startswith("slurm.gpus_per_node: 2 GPUs for 4 ranks")
    assert _problems(run_dir, ranks_per_node=4, gpus_per_node=0) == []


def test_gpus_without_a_rank_are_refused(run_dir: RunDir) -> None:
    [problem] = _problems(run_dir, ranks_per_node=1, gpus_per_node=4)
    assert problem == (
        "slurm.gpus_per_node: 4 GPUs for 1 ranks on each node; a rank uses one GPU, so give as many in slurm.ranks_per_node"
    )
    assert _problems(run_dir, ranks_per_node=4, gpus_per_node=4) == []


def test_a_file_in_the_place_of_a_folder_cannot_hold_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [problem] = _problems(RunDir(tmp_path / "file" / "run"))
    assert f"cannot be written ({tmp_path / 'file'} is no writable folder); change run.root" in problem


def test_a_folder_without_write_permission_is_named(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    [problem] = _problems(run_dir)
    assert f"({run_dir.path.parent} is no writable folder)" in problem


BESIDE = 4  # a stop's, the one being written, and the newest that was damaged and that diverged
TOO_MANY = 10**14


@pytest.mark.parametrize(
    ("settings", "count", "bytes_of_each"),
    [
        ({"keep_last": 2}, 2, 12),
        ({"keep_last": 3, "keep_best": 4}, 3 + 4, 12),
        ({"keep_last": 2, "keep_every_steps": 20_000}, 2 + 100_000 // 20_000, 12),
        ({"keep_last": 2, "ema_decay": 0.999}, 2, 16),
    ],
)
def test_too_little_disk_space_says_how_much_the_checkpoints_take(
    run_dir: RunDir, settings: dict[str, Any], count: int, bytes_of_each: int
) -> None:
    config = config_of().model_dump()
    config["training"] |= {key: value for key, value in settings.items() if key in config["training"]}
    config["checkpoints"] |= {key: value for key, value in settings.items() if key in config["checkpoints"]}
    [problem] = submission_problems(Config.model_validate(config), run_dir, TOO_MANY)
    assert f"will take {bytes_of_each * TOO_MANY * (count + BESIDE) / 1e9:.1f} GB more; free some" in problem


def test_checkpoints_that_are_there_already_need_no_more_space(run_dir: RunDir) -> None:
    (run_dir.checkpoints / "step_00000010").mkdir(parents=True)
    with (run_dir.checkpoints / "step_00000010" / "state_00000.safetensors").open("wb") as file:
        file.truncate(10**12)
    [problem] = _problems(run_dir, TOO_MANY, keep_last=2)
    assert f"will take {(12 * TOO_MANY * (2 + BESIDE) - 10**12) / 1e9:.1f} GB more; free some" in problem


def test_a_time_limit_must_leave_time_before_the_signal(run_dir: RunDir) -> None:
    [problem] = _problems(run_dir, time_limit="4:00", signal_seconds=180)
    assert problem.startswith("slurm.time_limit: 4:00 is 240 s, but the job is signalled to save 180 s before its end")
    assert problem.endswith("give more than 240 s")
    assert _problems(run_dir, time_limit="4:01", signal_seconds=180) == []
    assert _problems(run_dir, time_limit="0") == []


@pytest.mark.parametrize("text", ["1:2:3:4", "1-", ":", "-5", "1-2-3"])
def test_a_time_limit_that_sbatch_would_not_read_is_refused(run_dir: RunDir, text: str) -> None:
    [problem] = _problems(run_dir, time_limit=text)
    assert problem == f"slurm.time_limit: {text!r}: expected hours:minutes:seconds or days-hours:minutes:seconds"


@pytest.mark.parametrize(
    ("text", "days", "hours", "minutes", "seconds"),
    [
        ("0", 0, 0, 0, 0),
        ("90", 0, 0, 90, 0),
        ("90:30", 0, 0, 90, 30),
        ("2:30:15", 0, 2, 30, 15),
        ("3-2", 3, 2, 0, 0),
        ("3-2:30", 3, 2, 30, 0),
        ("3-2:30:15", 3, 2, 30, 15),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(
    text: str, days: int, hours: int, minutes: int, seconds: int
) -> None:
    assert seconds_of(text) == ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def test_a_checkpoint_interval_longer_than_the_job_is_refused_once_a_run_has_measured_its_steps(
    run_dir: RunDir,
) -> None:
    assert _problems(run_dir, every_steps=100, time_limit="1:00:00") == []
    _record(run_dir, seconds_a_step=50.0)
    [problem] = _problems(run_dir, every_steps=100, time_limit="1:00:00")
    assert problem.startswith(
        "checkpoints.every_steps: 100 steps of 50 s, as measured so far, are more than slurm.time"
    )
    assert _problems(run_dir, every_steps=72, time_limit="1:00:00") == []
    assert _problems(run_dir, every_steps=100, time_limit="0") == []


def test_nights_and_queues_between_the_starts_of_a_run_are_no_time_of_steps(run_dir: RunDir) -> None:
    """A run of few records, most of which were written by another start than the one before."""
    write_json(run_dir.state, {"state": "stopped"})
    times = (("train", 10, 100.0), ("start", 10, 40000.0), ("train", 20, 40100.0), ("start", 20, 90000.0),
             ("train", 30, 90100.0))  # fmt: skip
    for event, step, time in times:
        with (run_dir.history if event == "start" else run_dir.metrics).open("a") as file:
            file.write(json.dumps({"event": event, "step": step, "time": time}) + "\n")
    assert _problems(run_dir, every_steps=10, time_limit="1:00:00") == []
    with run_dir.metrics.open("a") as file:
        file.write('{"event": "train", "step": 40, "time": 95100.0}\n')
    [problem] = _problems(run_dir, every_steps=10, time_limit="1:00:00", signal_seconds=500)
    assert problem.startswith("checkpoints.every_steps: 10 steps of 500 s, as measured so far, are more than")


def test_a_save_that_took_longer_than_there_is_time_for_is_refused(run_dir: RunDir) -> None:
    _record(run_dir, seconds_a_step=10.0, save_seconds=175.0)
    [problem] = _problems(run_dir, signal_seconds=180)
    assert problem.startswith(
        "slurm.signal_seconds: 180 s before the limit the job is signalled to save, but a step, a save in"
    )
    assert "one more may take 185 s, as measured in this run" in problem
    assert _problems(run_dir, signal_seconds=185) == []


def test_a_checkpoint_is_written_twice_within_the_time_for_a_save_if_one_was_in_flight(run_dir: RunDir) -> None:
    _record(run_dir, seconds_a_step=10.0, save_seconds=1.0)
    history = MetricsLog(run_dir.history)
    for step, seconds in ((10, 100.0), (20, 900.0), (30, 50.0)):
        history.append("saved", step, {"write_seconds": seconds})
    history.close()
    [problem] = _problems(run_dir, signal_seconds=200)
    assert "a save in flight and one more may take 210 s, as measured in this run" in problem
    assert [*start_problems(config_of(signal_seconds=200), run_dir)] == [problem]
    assert _problems(run_dir, signal_seconds=210) == []


def test_a_check_without_a_submission_knows_the_memory_of_the_gpus() -> None:
    config = config_of(gpu_memory_gb=0.5, gpus_per_node=1)
    [problem] = memory_problems(config)
    assert problem.startswith("slurm.gpu_memory_gb: ")


def _initial_weights_problems(run_dir: RunDir, path: Path, *, after: bool = False) -> list[str]:
    config = config_of()
    training = config.training.model_copy(update={"init_from": str(path)})
    return submission_problems(config.model_copy(update={"training": training}), run_dir, 1, is_after_others=after)


def test_weights_to_start_with_that_are_not_there_are_refused(run_dir: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    [problem] = _initial_weights_problems(run_dir, other.path)
    assert problem.startswith(f"training.init_from: {other.path} is no folder; expected a run folder with model/ or")
    assert _initial_weights_problems(run_dir, other.path, after=True) == [], "a job that comes first may make it"
    other.checkpoints.mkdir(parents=True)
    assert "has no weights" in _initial_weights_problems(run_dir, other.path)[0]


def test_weights_to_start_with_are_found_wherever_training_finds_them(run_dir: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    step = other.checkpoints / "step_00000009"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    other.model.mkdir()
    (other.model / "model.safetensors").touch()
    for path in (other.path, step, other.model):
        assert _initial_weights_problems(run_dir, path) == []


def test_a_run_that_goes_on_needs_no_weights_to_start_with(run_dir: RunDir, tmp_path: Path) -> None:
    (run_dir.checkpoints / "step_00000009").mkdir(parents=True)
    assert _initial_weights_problems(run_dir, tmp_path / "gone") == []


def test_a_prepared_corpus_that_is_not_there_needs_a_place_to_be_made_in(
    tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(data={"prepared": str(tmp_path / "corpus")})
    assert submission_problems(config, run_dir, 1) == []
    (tmp_path / "corpus").write_text("")
    [problem] = submission_problems(config, run_dir, 1)
    assert problem.startswith(f"data.prepared: {tmp_path}/corpus cannot be written")


def test_a_run_folder_whose_text_and_prepared_corpus_are_gone_is_not_submitted(tmp_path: Path, run_dir: RunDir) -> None:
    train = {"train": {"source": "gone.en", "target": "gone.de"}, "root": str(tmp_path)}
    config = config_of(data={**train, "prepared": str(tmp_path / "corpus")})
    run_dir.path.mkdir()
    run_dir.config.write_text("")
    problems = submission_problems(config, run_dir, 1)
    assert [problem.split(":")[0] for problem in problems] == ["data.train.source", "data.train.target"]
    assert problems[0].endswith(f"(the corpus in {tmp_path}/corpus is not prepared yet)")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "manifest.json").write_text("{}")
    assert submission_problems(config, run_dir, 1) == []
