"""From a configuration to the script, the argv of sbatch and the files of the run folder."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dist_transformer.cluster.checks import parse_time_limit, submission_problems
from dist_transformer.cluster.slurm import SlurmError, clean_environment
from dist_transformer.cluster.submit import plan_submission, render_script, submit
from dist_transformer.config.models import Config, SlurmConfig
from dist_transformer.errors import ConfigError
from dist_transformer.run_dir import RunDir, read_json, write_json
from dist_transformer.share_folder import share_folder

NASTY = [
    "two words",
    "it's",
    'say "hi"',
    "$(touch executed)",
    "`touch executed`",
    "a;touch executed",
    "x\ntouch executed",
    "naïve ßtraße 日本",
    "--dashes",
    "~/$HOME/*",
    "\\",
    "",
]


def _config(*, lanes: int = 8, keep_last: int = 5, **slurm: object) -> Config:
    return Config.model_validate(
        {
            "data": {"train": {"demo": "train"}, "lanes": lanes},
            "checkpoints": {"keep_last": keep_last},
            "slurm": slurm,
        }
    )


def _problems(run_dir: RunDir, num_parameters: int = 1000, **settings: object) -> list[str]:
    return submission_problems(_config(**settings), run_dir, num_parameters)  # type: ignore[arg-type]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sbatch that records its argv and environment, squeue that prints the file `jobs`; tests/slurm has real ones."""
    folder = tmp_path / "bin"
    folder.mkdir()
    _program(folder / "sbatch", 'printf "%s\\0" "$@" > "$0.argv"; env -0 > "$0.env"; echo "4711;cluster"')
    _program(folder / "squeue", 'cat "$(dirname "$0")/jobs"')
    (folder / "jobs").write_text("")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def _program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# -------------------------------------------------------------------------------------------------- script and argv


@pytest.mark.parametrize("value", NASTY)
def test_every_value_reaches_the_script_as_it_is_and_is_never_executed(tmp_path: Path, value: str) -> None:
    run_dir = RunDir(tmp_path / f"root {value.replace('/', '_')}" / "run")
    slurm = SlurmConfig.model_validate({"environment": {"VALUE": value}, "extra_srun": [value, "b"], "setup": [value]})
    script = render_script(slurm, run_dir, f"/opt/{value}/python")
    settings = script.split("# --- settings\n")[1].split("# --- end of settings")[0]
    show = 'printf "%s\\0" "$VALUE" "$python" "$code" "$setup" "${srun_options[@]}"'
    done = subprocess.run(["bash", "-euc", settings + show], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [
        value,
        f"/opt/{value}/python",
        str(run_dir.snapshot),
        value,
        value,
        "b",
    ]
    assert not (tmp_path / "executed").exists()


def test_the_setup_lines_are_run_one_after_the_other_by_the_script(run_dir: RunDir) -> None:
    slurm = SlurmConfig.model_validate({"setup": ["answer='forty two'", 'echo "$answer" >&2', "exit 9"]})
    script = render_script(slurm, run_dir, "python3")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (9, "forty two\n")


def test_outside_its_settings_the_script_is_the_file_that_people_use_by_hand(run_dir: RunDir) -> None:
    file = (share_folder("slurm") / "train.sbatch").read_text()
    script = render_script(SlurmConfig.model_validate({}), run_dir, "python3")
    end = "# --- end of settings"
    assert script.split("# --- settings\n")[0] == file.split("# --- settings\n")[0]
    assert script.split(end)[1] == file.split(end)[1]


def test_the_batch_and_launch_scripts_are_valid_shell() -> None:
    for path in [share_folder("slurm") / "train.sbatch", *share_folder("launch").glob("*.sh")]:
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_arguments_of_sbatch_say_what_the_configuration_says(run_dir: RunDir) -> None:
    config = _config(
        nodes=2, ranks_per_node=4, gpus_per_node=4, cpus_per_rank=3, memory="10G", time_limit="1-02:03:04",
        signal_seconds=100, partition="gpu", account="a b", extra_sbatch=["--reservation=x y", "--exclusive"],
    )  # fmt: skip
    arguments = plan_submission(config, "", run_dir, 1, dry_run=True).sbatch_arguments
    assert arguments[-4:] == ("--reservation=x y", "--exclusive", str(run_dir.submitted_script), str(run_dir.path))
    assert set(arguments[:-4]) == {
        "--parsable", "--requeue", "--job-name=run", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3",
        "--gpus-per-node=4", "--mem=10G", "--time=1-02:03:04", "--partition=gpu", "--account=a b",
        "--signal=B:USR1@100", "--open-mode=append", f"--output={run_dir.slurm}/job-%j.log",
    }  # fmt: skip


def test_a_percent_sign_in_the_path_is_not_read_as_a_pattern_of_the_log(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "50%j" / "run")
    arguments = plan_submission(_config(), "", run_dir, 1, dry_run=True).sbatch_arguments
    assert f"--output={tmp_path}/50%%j/run/slurm/job-%j.log" in arguments


def test_a_relative_run_folder_becomes_absolute_in_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    submission = plan_submission(_config(), "", RunDir(Path("runs/first")), 1, dry_run=True)
    assert submission.sbatch_arguments[-1] == str(tmp_path / "runs" / "first")


def test_a_dry_run_creates_nothing_and_needs_no_slurm(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    submission = plan_submission(_config(), "text", run_dir, 1, dry_run=True)
    assert submission.files == {run_dir.config: "text", run_dir.submitted_script: submission.script}
    assert not run_dir.path.exists()


def test_submitting_does_not_import_torch() -> None:
    program = (
        "import sys, dist_transformer.cluster.submit as s, dist_transformer.launching; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ------------------------------------------------------------------------------------------------------ submitting


def test_submitting_writes_the_run_folder_and_calls_sbatch_with_exactly_the_planned_arguments(
    run_dir: RunDir, fake_slurm: Path
) -> None:
    write_json(run_dir.restarts, {"newest_checkpoint": None, "without_progress": 3})
    submission = plan_submission(_config(), "data: {}\n", run_dir, 1)
    assert submit(submission) == "4711"
    assert (fake_slurm / "sbatch.argv").read_text().split("\0")[:-1] == list(submission.sbatch_arguments)
    assert run_dir.config.read_text() == "data: {}\n"
    assert run_dir.submitted_script.read_text() == submission.script
    assert (run_dir.snapshot / "dist_transformer" / "__init__.py").is_file()
    job = read_json(run_dir.job)
    assert (job["job_id"], job["command"]) == ("4711", submission.command)
    assert not run_dir.restarts.exists()


def test_a_job_does_not_inherit_the_job_or_rank_it_was_submitted_from(
    run_dir: RunDir, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SRUN_DEBUG", "SBATCH_PARTITION", "MASTER_PORT", "RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("KEPT", "x y")
    submit(plan_submission(_config(), "", run_dir, 1))
    given = dict(line.split("=", 1) for line in (fake_slurm / "sbatch.env").read_text().split("\0")[:-1])
    assert (given["SLURM_CONF"], given["KEPT"]) == ("/etc/slurm.conf", "x y")
    assert not given.keys() & {
        *("SLURM_JOB_ID", "SRUN_DEBUG", "SBATCH_PARTITION", "MASTER_PORT", "RANK", "CUDA_VISIBLE_DEVICES")
    }


def test_the_scrub_takes_whole_names_and_prefixes_only() -> None:
    kept = {"SLURM_CONF": "a", "MY_RANK": "b", "RANKS": "c", "PATH": "d"}
    assert clean_environment({**kept, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "n"}) == kept


def test_what_sbatch_says_against_a_job_is_what_the_user_reads(run_dir: RunDir, fake_slurm: Path) -> None:
    _program(fake_slurm / "sbatch", 'echo "sbatch: error: invalid partition specified: gup" >&2; exit 1')
    with pytest.raises(SlurmError, match="sbatch refused: sbatch: error: invalid partition specified: gup\n  command:"):
        submit(plan_submission(_config(), "", run_dir, 1))
    assert not run_dir.job.exists()


def test_a_run_folder_on_which_a_job_works_is_refused(run_dir: RunDir, fake_slurm: Path) -> None:
    submit(plan_submission(_config(), "", run_dir, 1))
    (fake_slurm / "jobs").write_text("RUNNING|None\n")
    with pytest.raises(ConfigError, match=r"job 4711 already works on it \(RUNNING\); wait for it, `scancel 4711`"):
        plan_submission(_config(), "", run_dir, 1)
    (fake_slurm / "jobs").write_text("COMPLETED|None\n")
    assert submit(plan_submission(_config(), "", run_dir, 1)) == "4711"


def test_without_sbatch_the_user_is_told_where_to_go(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="sbatch: not found on PATH; submit from a login node"):
        plan_submission(_config(), "", run_dir, 1)


# ---------------------------------------------------------------------------------------------------------- checks


def test_a_sound_configuration_has_no_problems(run_dir: RunDir) -> None:
    sound = {
        "environment": {"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false"},
        "extra_sbatch": ["--nodelist=n1"],
    }
    assert _problems(run_dir, **sound) == []


def test_all_problems_are_reported_at_once(run_dir: RunDir) -> None:
    config = _config(lanes=2, nodes=3, time_limit="2:00", extra_sbatch=["x"], environment={"HF_TOKEN": "t"})
    with pytest.raises(ConfigError) as caught:
        plan_submission(config, "", RunDir(run_dir.path.with_name("-run")), 10**15, dry_run=True)
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize("name", ["-x", ".x", "a b", ["a", "$(b)"][-1], "ü", "a'b", "a\nb"])
def test_a_run_name_that_slurm_or_a_shell_could_misread_is_refused(tmp_path: Path, name: str) -> None:
    [problem] = [p for p in _problems(RunDir(tmp_path / name)) if p.startswith("run.name")]
    assert problem.startswith(f"run.name: {name!r}: expected letters, digits, '.', '_' and '-'")


def test_a_path_that_sbatch_cannot_write_its_log_to_is_refused(tmp_path: Path) -> None:
    [problem] = _problems(RunDir(tmp_path / "a\\b" / "run"))
    assert "sbatch cannot write logs below a path with a backslash" in problem


def test_more_ranks_than_lanes_are_refused(run_dir: RunDir) -> None:
    [problem] = _problems(run_dir, lanes=7, nodes=2, ranks_per_node=4)
    assert problem.startswith("slurm: 2 nodes x 4 ranks = 8 ranks, more than data.lanes 7")


def test_fewer_gpus_than_ranks_are_refused_but_none_is_cpu_training(run_dir: RunDir) -> None:
    [problem] = _problems(run_dir, ranks_per_node=4, gpus_per_node=2)
    assert problem.startswith("slurm.gpus_per_node: 2 GPUs for 4 ranks")
    assert _problems(run_dir, ranks_per_node=4, gpus_per_node=0) == []


def test_a_file_in_the_place_of_a_folder_cannot_hold_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [problem] = _problems(RunDir(tmp_path / "file" / "run"))
    assert f"cannot be written ({tmp_path / 'file'} is no writable folder); change run.root" in problem


def test_a_folder_without_write_permission_is_named(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    [problem] = _problems(run_dir)
    assert f"({run_dir.path.parent} is no writable folder)" in problem


def test_too_little_disk_space_says_how_much_the_checkpoints_take(run_dir: RunDir) -> None:
    num_parameters = 10**14
    [problem] = _problems(run_dir, num_parameters, keep_last=2)
    assert f"its checkpoints will take {12 * num_parameters * 3 / 1e9:.1f} GB" in problem


def test_a_time_limit_must_leave_time_before_the_signal(run_dir: RunDir) -> None:
    [problem] = _problems(run_dir, time_limit="4:00", signal_seconds=180)
    assert problem.startswith("slurm.time_limit: 4:00 is 240 s, but the job is told to save 180 s before its end")
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
    assert parse_time_limit(text) == ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@pytest.mark.parametrize("option", ["-N4", "reservation=x", "--exclude n1", "--a\nb", "$(x)"])
def test_extra_options_that_are_no_options_are_refused(run_dir: RunDir, option: str) -> None:
    assert _problems(run_dir, extra_sbatch=[option]) == [
        f"slurm.extra_sbatch: {option!r}: expected --option or --option=value, one an entry"
    ]
    assert _problems(run_dir, extra_srun=[option]) == [
        f"slurm.extra_srun: {option!r}: expected --option or --option=value, one an entry"
    ]


@pytest.mark.parametrize(
    "option",
    [
        "--requeue",
        "--signal=B:TERM@9",
        "--open-mode=truncate",
        "--nodes=9",
        "--ntasks-per-node=1",
        "--output=x",
        "--sig=9",
    ],
)
def test_an_extra_option_cannot_override_what_the_script_relies_on(run_dir: RunDir, option: str) -> None:
    [problem] = _problems(run_dir, extra_sbatch=[option])
    assert problem.startswith(f"slurm.extra_sbatch: {option!r}: {option.split('=')[0]}")
    assert "is set by submit" in problem


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("2X", "", "expected a variable's name"),
        ("A B", "", "expected a variable's name"),
        ("A;touch x", "", "expected a variable's name"),
        ("RANK", "0", "is set by the batch script"),
        ("SLURM_CONF", "x", "is set by the batch script"),
        ("MASTER_ADDR", "x", "is set by the batch script"),
        ("HF_TOKEN", "x", "looks like a secret"),
        ("MLFLOW_TRACKING_PASSWORD", "x", "looks like a secret"),
        ("AWS_SECRET_ACCESS_KEY", "x", "looks like a secret"),
        ("A", "x\0y", "a variable cannot hold a zero byte"),
    ],
)
def test_variables_that_cannot_or_must_not_be_written_are_refused(
    run_dir: RunDir, name: str, value: str, expected: str
) -> None:
    [problem] = _problems(run_dir, environment={name: value})
    assert problem.startswith(f"slurm.environment.{name}: {expected}")
