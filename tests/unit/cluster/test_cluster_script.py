"""The batch scripts with the values of a submission, run by a real bash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_helpers import NASTY, config_of

import dist_transformer
from dist_transformer.cluster.script import needed_folders, render_script
from dist_transformer.config.slurm_schema import SlurmConfig
from dist_transformer.package_data import share_folder

PACKAGE = Path(dist_transformer.__file__).parent
SCRIPTS = sorted(path.name for path in share_folder("slurm").glob("*.sbatch"))
END = "# --- end of settings"
REQUEUEING = ("prepare.sbatch", "translate.sbatch", "command.sbatch")


def _settings(script: str) -> str:
    return script.split("# --- settings\n")[1].split(END)[0]


def _values(folder: Path, script: str, *names: str) -> list[str]:
    """What bash makes of the settings; arrays word by word."""
    show = 'printf "%s\\0" ' + " ".join(f'"${{{name}}}"' for name in names)
    done = subprocess.run(["bash", "-euc", _settings(script) + show], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def _slurm(**settings: object) -> SlurmConfig:
    return config_of(**settings).slurm


@pytest.mark.parametrize("value", NASTY)
def test_every_value_reaches_the_script_as_it_is_and_is_never_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    slurm = _slurm(environment={"VALUE": value}, srun={"comment": value, "cpu-bind": None}, setup=[value])
    code = tmp_path / f"root {value.replace('/', '_')}"
    monkeypatch.setattr(sys, "executable", f"/opt/{value}/python")
    script = render_script("train.sbatch", slurm, code)
    found = _values(tmp_path, script, "VALUE", "python", "code", "setup", "srun_options[@]")
    assert found == [value, f"/opt/{value}/python", str(code), value, f"--comment={value}"]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("value", [v for v in NASTY if v])
@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_images_and_mounts_reach_the_script_as_they_are(tmp_path: Path, value: str, runtime: str) -> None:
    slurm = _slurm(container_image=value, container_runtime=runtime, container_mounts=[f"/{value}"], gpus_per_node=1)
    script = render_script("train.sbatch", slurm, tmp_path, [Path(f"/root/{value}")])
    mounts = [f"{path}:{path}" for path in (str(Path(f"/root/{value}")), f"/{value}")]
    words = _values(tmp_path, script, "srun_options[@]", "rank_prefix[@]")
    if runtime == "pyxis":
        container = [
            f"--container-image={value}",
            f"--container-mounts={','.join(mounts)}",
            "--no-container-mount-home",
        ]
        assert words == ["--cpu-bind=cores", *container]
    else:
        binds = ["--bind", mounts[0], "--bind", mounts[1]]
        assert words == ["--cpu-bind=cores", "apptainer", "exec", "--nv", *binds, value]
    assert not (tmp_path / "executed").exists()


def test_pyxis_gives_an_image_its_gpus_but_for_what_the_user_sets(tmp_path: Path) -> None:
    names = "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"
    given = {"container_image": "i.sqsh", "gpus_per_node": 8}
    script = render_script("train.sbatch", _slurm(**given), tmp_path)
    assert _values(tmp_path, script, *names) == ["all", "compute,utility"]
    script = render_script("train.sbatch", _slurm(**given, environment={names[0]: "0,1"}), tmp_path)
    assert _values(tmp_path, script, *names) == ["0,1", "compute,utility"]
    assert names[0] not in render_script("train.sbatch", _slurm(container_image="i.sqsh"), tmp_path)
    assert names[0] not in render_script("prepare.sbatch", _slurm(**given), tmp_path)  # has no GPU


def test_without_gpus_a_container_is_not_asked_for_them(tmp_path: Path) -> None:
    slurm = _slurm(container_image="i.sif", container_runtime="apptainer")
    assert _values(tmp_path, render_script("train.sbatch", slurm, tmp_path), "rank_prefix[@]") == [
        *("apptainer", "exec", "i.sif")
    ]


def test_the_ranks_in_a_container_use_its_python_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/host/python")

    def interpreter(**settings: object) -> list[str]:
        script = render_script("train.sbatch", _slurm(**settings), tmp_path)
        return _values(tmp_path, script, "DIST_TRANSFORMER_PYTHON:-none", "python")

    assert interpreter() == ["none", "/host/python"]
    assert interpreter(container_image="i") == ["python3", "/host/python"]
    named = {"DIST_TRANSFORMER_PYTHON": "/opt/python"}
    assert interpreter(container_image="i", environment=named) == ["/opt/python", "/host/python"]


def test_a_mount_that_is_given_twice_is_made_once_and_a_renamed_one_stays(tmp_path: Path) -> None:
    slurm = _slurm(container_image="i", container_mounts=["/runs", "/data:/corpora:ro"])
    script = render_script("train.sbatch", slurm, tmp_path, [Path("/runs")])
    assert "--container-mounts=/runs:/runs,/data:/corpora:ro" in _values(tmp_path, script, "srun_options[@]")


def test_the_ranks_must_see_the_runs_the_text_and_the_prepared_corpus(tmp_path: Path) -> None:
    config = config_of(data={"root": "s3://bucket/text", "prepared": str(tmp_path / "prepared")})
    assert needed_folders(config, tmp_path / "runs") == [tmp_path / "runs", tmp_path / "prepared"]
    config = config_of(data={"root": str(tmp_path / "text")})
    assert needed_folders(config, tmp_path / "runs") == [tmp_path / "runs", tmp_path / "text"]


def test_the_ranks_must_see_files_that_lie_elsewhere(tmp_path: Path) -> None:
    names = [
        "text/in.de",
        "text/in.en",
        "far/v.de",
        "far/v.en",
        "far/more/a.de",
        "far/more/b.de",
        "t/a.en",
        "code/m.py",
    ]
    for name in (*names, "spm/s.model"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    data = {
        "root": str(tmp_path / "text"),
        "train": {"source": "in.de", "target": "in.en"},
        "validation": {"source": f"{tmp_path}/far/v.de", "target": f"{tmp_path}/far/v.en"},
        "test": {"source": f"{tmp_path}/far/more/*.de", "target": f"{tmp_path}/t/a.en"},
    }
    config = config_of(data=data)
    tokenizer = config.tokenizer.model_copy(update={"source_model": f"{tmp_path}/spm/s.model"})
    model = config.model.model_copy(update={"plugin": f"{tmp_path}/code/m.py:Net"})
    config = config.model_copy(update={"tokenizer": tokenizer, "model": model})
    folders = [tmp_path / name for name in ("runs", "text", "far", "t", "spm", "code")]
    assert needed_folders(config, tmp_path / "runs") == folders


@pytest.mark.parametrize("name", REQUEUEING)
def test_a_log_that_takes_no_more_writes_ends_no_script(tmp_path: Path, name: str) -> None:
    (tmp_path / "srun").write_text("#!/bin/bash\nexit 3\n")
    (tmp_path / "srun").chmod(0o755)
    checkout = str(PACKAGE.parent)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": checkout, "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": "20"}
    with Path("/dev/full").open("wb", buffering=0) as full:
        done = subprocess.run(
            ["bash", str(share_folder("slurm") / name), "translate"], cwd=tmp_path, stdout=full, check=False,
            env={**os.environ, **slurm, "PATH": f"{tmp_path}:/usr/bin:/bin", "DIST_TRANSFORMER_PYTHON": sys.executable},
        )  # fmt: skip
    assert done.returncode == 3


def test_the_preflight_is_set_up_as_the_configuration_says(tmp_path: Path) -> None:
    slurm = _slurm(preflight="exclude", signal_seconds=99)
    names = ("preflight", "preflight_seconds", "preflight_tolerance", "DIST_TRANSFORMER_SIGNAL_SECONDS")
    found = _values(tmp_path, render_script("train.sbatch", slurm, tmp_path), *names)
    assert found == ["exclude", "180", "0.8", "99"]


def test_the_setup_lines_are_run_one_after_the_other_by_the_script(tmp_path: Path) -> None:
    slurm = _slurm(setup=["answer='forty two'", 'echo "$answer" >&2', "exit 9"])
    for name in SCRIPTS:
        script = render_script(name, slurm, tmp_path)
        environment = _fake_srun(tmp_path, 0)
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (9, "forty two\n")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_token_of_the_login_node_goes_no_further_than_the_script(tmp_path: Path, name: str) -> None:
    """It expires while the job waits, and srun takes none. One of the setup's own stays."""
    script = render_script(name, _slurm(setup=['echo "${SLURM_JWT-none}" >&2', "exit 9"]), tmp_path)
    environment = {**_fake_srun(tmp_path, 0), "SLURM_JWT": "token"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (9, "none\n")


@pytest.mark.parametrize("name", SCRIPTS)
def test_outside_its_settings_a_script_is_the_file_that_people_use_by_hand(tmp_path: Path, name: str) -> None:
    file = (share_folder("slurm") / name).read_text()
    script = render_script(name, _slurm(), tmp_path)
    assert script.split("# --- settings\n")[0] == file.split("# --- settings\n")[0]
    assert script.split(END)[1] == file.split(END)[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_submit_gives_every_setting_that_a_script_has(tmp_path: Path, name: str) -> None:
    def names(text: str) -> set[str]:
        return {line.split("=")[0] for line in _settings(text).splitlines() if not line.startswith("export ")}

    by_hand = (share_folder("slurm") / name).read_text()
    assert names(by_hand) <= names(render_script(name, _slurm(), tmp_path))


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_takes_the_limits_of_the_shell_that_submits_it(name: str) -> None:
    """Login nodes limit the time and the addresses of a process; ranks would die of it in each attempt."""
    lines = (share_folder("slurm") / name).read_text().splitlines()
    assert [line for line in lines if line.startswith("#SBATCH") and " --propagate=NONE" in line]


def test_the_batch_and_launch_scripts_are_valid_shell() -> None:
    for path in [*share_folder("slurm").glob("*.sbatch"), *share_folder("launch").glob("*.sh")]:
        subprocess.run(["bash", "-n", str(path)], check=True)


def _fake_srun(folder: Path, exit_code: int) -> dict[str, str]:
    """An srun that writes its argv into the file `argv`."""
    (folder / "srun").write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {folder}/argv\nexit {exit_code}\n')
    (folder / "srun").chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_CPUS_PER_TASK": "3",
    }
    return {"PATH": f"{folder}:/usr/bin:/bin", **slurm}


@pytest.mark.parametrize("exit_code", [0, 2])
def test_a_command_runs_as_one_task_with_its_arguments_as_they_are_and_its_exit_code(
    tmp_path: Path, exit_code: int
) -> None:
    slurm = _slurm(srun={"mpi": "none"}, container_image="i.sif", container_runtime="apptainer")
    script = render_script("command.sbatch", slurm, tmp_path)
    environment = _fake_srun(tmp_path, exit_code)
    command = ["bash", "-c", script, "script", "evaluate", "a $(touch executed) 'run'"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == exit_code
    assert (tmp_path / "argv").read_text().split("\0")[:-1] == [
        *("--nodes=1", "--ntasks=1", "--cpu-bind=cores", "--mpi=none", "apptainer", "exec", "i.sif", "python3", "-u"),
        *("-m", "dist_transformer", "evaluate", "a $(touch executed) 'run'"),
    ]
    assert f"exit code {exit_code}" in done.stdout
    assert not (tmp_path / "executed").exists()


def _run_script(
    folder: Path, programs: dict[str, str], code: Path | None = None, restarts: int = 0, name: str = "prepare.sbatch"
) -> subprocess.CompletedProcess[str]:
    """Runs the script with these programs beside an srun that ends with 75; `sleep` takes no time."""
    environment = {**_fake_srun(folder, 75), "SLURM_RESTART_COUNT": f"{restarts}"}
    for program, body in {"sleep": "", "scontrol": "", **programs}.items():
        (folder / program).write_text(f'#!/bin/bash\necho "{program} $*" >> {folder}/calls\n{body}\n')
        (folder / program).chmod(0o755)
    script = render_script(name, _slurm(), code or folder)
    command = ["bash", "-c", script, "script", "config.yaml"]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "name", [name for name in SCRIPTS if "PYTHONPATH" in (share_folder("slurm") / name).read_text()]
)
def test_code_in_a_folder_that_pythonpath_would_split_is_refused_by_hand_too(tmp_path: Path, name: str) -> None:
    code = tmp_path / "a:b"
    (code / "dist_transformer").mkdir(parents=True)
    script = render_script(name, _slurm(), code)
    command = ["bash", "-c", script, "script", "run"]
    environment = _fake_srun(tmp_path, 0)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"{code}: ':' splits PYTHONPATH; move it\n")
    assert not (tmp_path / "argv").exists()


def _calls(folder: Path, name: str) -> list[str]:
    return [line for line in (folder / "calls").read_text().splitlines() if line.startswith(name)]


TERM_TO_THE_SCRIPT = "kill -TERM $PPID; exit {}"
RECORD = (
    "JobId=7 JobName=a JobState=RUNNING  b UserId=u(0) JobState={} Reason={} Requeue=1 Restarts={} "
    "EndTime={} Deadline=N/A PreemptTime={} SuspendTime=None"
)
TAKEN_BY = {
    "limit": RECORD.format("COMPLETING", "TimeLimit", 0, 1000, "None"),
    "person": RECORD.format("COMPLETING", "None", 0, 1000, "None"),
    "person, resumed before": RECORD.format("CANCELLED", "None", 0, 1000, 900),
    "shutdown": RECORD.format("RUNNING", "None", 0, 1000, "None"),
    "pre-emption, grace time": RECORD.format("RUNNING", "None", 0, 1020, 1000),
    "pre-emption, CANCEL": RECORD.format("COMPLETING", "None", 0, 1001, 1000),
    "pre-emption, REQUEUE": RECORD.format("COMPLETING", "None", 1, 1000, 1000),
}
REQUEUED = {"limit", "shutdown", "pre-emption, grace time", "pre-emption, CANCEL"}
"""By the script: Slurm itself requeues some, and what a person has cancelled stays cancelled."""
LATE = "[ $(grep -c show {}/calls) != 1 ] || exit 1; "


def _answering(record: str, before: str = "") -> str:
    return f'case "$*" in *"show job 7"*) {before}echo "{record}" ;; esac'


@pytest.mark.parametrize("name", REQUEUEING)
def test_the_lines_that_requeue_are_the_same_in_each_script(name: str) -> None:
    lines = [(share_folder("slurm") / each).read_text().split("# --- ")[3] for each in (name, REQUEUEING[0])]
    assert lines[0] == lines[1]
    assert lines[0].startswith("requeue: the same lines in ")


@pytest.mark.slow
@pytest.mark.parametrize("who", TAKEN_BY)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("name", REQUEUEING)
def test_a_job_goes_back_to_the_queue_when_the_machine_took_it_but_not_when_it_was_cancelled(
    tmp_path: Path, who: str, is_late: bool, name: str
) -> None:
    """At its time limit, too, where it has kept what was done."""
    scontrol = _answering(TAKEN_BY[who], LATE.format(tmp_path) if is_late else "")
    programs = {"srun": TERM_TO_THE_SCRIPT.format(75), "scontrol": scontrol, "python3": "echo launch"}
    done = _run_script(tmp_path, programs, name=name)
    assert done.returncode == 75, done.stderr
    keeps = name != "command.sbatch" or who != "limit"
    assert _calls(tmp_path, "scontrol requeue") == ["scontrol requeue 7"] * (who in REQUEUED and keeps)


@pytest.mark.parametrize("name", REQUEUEING)
def test_a_job_that_slurm_may_not_requeue_ends_at_once(tmp_path: Path, name: str) -> None:
    scontrol = _answering(TAKEN_BY["shutdown"].replace("Requeue=1", "Requeue=0"))
    programs = {"srun": TERM_TO_THE_SCRIPT.format(143), "scontrol": scontrol, "python3": "echo launch"}
    done = _run_script(tmp_path, programs, name=name)
    assert done.returncode == 143
    assert "requeues are disabled for this job; submit it again" in done.stdout
    assert _calls(tmp_path, "scontrol requeue") + _calls(tmp_path, "sleep") == []


@pytest.mark.parametrize(
    ("exit_code", "restarts", "is_pre_empted", "requeues"),
    [
        (0, 0, True, 0),
        (2, 0, True, 0),
        (1, 0, False, 1),
        (143, 2, False, 1),
        (1, 3, False, 0),
        (143, 9, True, 1),
        (75, 0, False, 0),
    ],
)
def test_a_command_is_started_again_after_a_pre_emption_and_three_times_after_a_fault_and_not_after_a_stop_by_request(
    tmp_path: Path, exit_code: int, restarts: int, is_pre_empted: bool, requeues: int
) -> None:
    record = TAKEN_BY["pre-emption, grace time"].replace("Restarts=0", f"Restarts={restarts}")
    srun = TERM_TO_THE_SCRIPT.format(exit_code) if is_pre_empted else f"exit {exit_code}"
    programs = {"srun": srun, "scontrol": _answering(record)}
    done = _run_script(tmp_path, programs, restarts=restarts, name="command.sbatch")
    assert done.returncode == exit_code
    assert _calls(tmp_path, "scontrol requeue") == ["scontrol requeue 7"] * requeues


@pytest.mark.parametrize(
    ("exit_code", "restarts", "requeues"), [(0, 0, 0), (1, 0, 1), (2, 0, 0), (137, 19, 1), (1, 20, 0)]
)
def test_preparing_goes_back_to_the_queue_after_a_fault_of_the_machine_but_not_for_ever(
    tmp_path: Path, exit_code: int, restarts: int, requeues: int
) -> None:
    done = _run_script(tmp_path, {"srun": f"exit {exit_code}"}, restarts=restarts)
    assert done.returncode == exit_code
    assert _calls(tmp_path, "scontrol requeue") == ["scontrol requeue 7"] * requeues
    assert ("requeued 20 times" in done.stdout) == (restarts == 20)


@pytest.mark.parametrize(
    ("who", "exit_code", "requeues"),
    [
        ("limit", 75, 1),
        ("limit", 137, 0),
        ("person", 75, 0),
        ("shutdown", 75, 1),
        ("shutdown", 137, 1),
        ("shutdown", 1, 0),
    ],
)
def test_translating_goes_back_to_the_queue_after_its_time_limit_and_a_shutdown_that_may_kill_the_ranks(
    tmp_path: Path, who: str, exit_code: int, requeues: int
) -> None:
    srun, scontrol = TERM_TO_THE_SCRIPT.format(exit_code), _answering(TAKEN_BY[who])
    programs = {"srun": srun, "scontrol": scontrol, "python3": "echo launch"}
    done = _run_script(tmp_path, programs, name="translate.sbatch")
    assert done.returncode == exit_code, done.stderr
    assert _calls(tmp_path, "scontrol requeue") == ["scontrol requeue 7"] * requeues


def test_preparing_waits_for_a_controller_that_is_away_but_not_for_ever(tmp_path: Path) -> None:
    _run_script(tmp_path, {"scontrol": f"[ $(grep -c 'scontrol requeue' {tmp_path}/calls) = 3 ]"})
    assert _calls(tmp_path, "scontrol requeue") == ["scontrol requeue 7"] * 3
    (tmp_path / "calls").unlink()
    done = _run_script(tmp_path, {"scontrol": "exit 1"})
    assert done.returncode == 75
    assert "could not be requeued; submit it again" in done.stdout
    assert _calls(tmp_path, "sleep") == ["sleep 5"] * (5 * 60 // 5)


@pytest.mark.parametrize("name", ["prepare.sbatch", "translate.sbatch"])
def test_a_job_that_waits_for_the_controller_when_the_machine_takes_it_still_asks_for_its_requeue(
    tmp_path: Path, name: str
) -> None:
    """The signal reaches every process of the job, `sleep` too."""
    scontrol = f"[ $(grep -c 'scontrol requeue' {tmp_path}/calls) = 2 ] || exit 1"
    scontrol = f'if [ "$1" = requeue ]; then {scontrol}; else {_answering(TAKEN_BY["shutdown"])}; fi'
    programs = {"scontrol": scontrol, "sleep": "kill -TERM $PPID; exit 143", "python3": "echo launch"}
    done = _run_script(tmp_path, programs, name=name)
    assert _calls(tmp_path, "scontrol requeue") == ["scontrol requeue 7"] * 2, done.stderr


def test_preparing_does_not_requeue_what_slurm_has_requeued_or_a_person_cancelled_meanwhile(tmp_path: Path) -> None:
    scontrol = f'[ "$1" != requeue ] || {{ kill -TERM $PPID; exit 1; }}; {_answering(TAKEN_BY["person"])}'
    done = _run_script(tmp_path, {"scontrol": scontrol})
    assert _calls(tmp_path, "scontrol requeue") == ["scontrol requeue 7"]
    assert "could not be requeued" not in done.stdout


WAITS = ("prepare.sbatch", "train.sbatch", "translate.sbatch")


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("has_code", [True, False])
def test_a_disk_that_is_away_is_waited_for_that_of_the_code_and_that_of_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_code: bool
) -> None:
    code, python = tmp_path / "code", tmp_path / "venv" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    python.parent.mkdir()
    comes = [f"mkdir {code}", f"ln -s /bin/true {python}"]
    subprocess.run(["bash", "-c", comes.pop(not has_code)], check=True)
    sleep = f"[ $(grep -c sleep {tmp_path}/calls) -lt 2 ] || {comes[0]}"
    done = _run_script(tmp_path, {"sleep": sleep, "srun": "exit 0"}, code, name=name)
    assert (done.returncode, done.stderr) == (0, "")
    assert _calls(tmp_path, "sleep") == ["sleep 10"] * 2
    assert f"waiting until this node sees {code} and {python}" in done.stdout


def test_preparing_in_an_image_does_not_wait_for_a_python_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    slurm = _slurm(container_image="i.sif", container_runtime="apptainer")
    script = render_script("prepare.sbatch", slurm, tmp_path)
    environment = {**_fake_srun(tmp_path, 0), "SLURM_RESTART_COUNT": "20"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "waiting" in done.stdout) == (0, False)
