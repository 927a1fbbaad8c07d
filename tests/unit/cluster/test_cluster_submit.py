"""From a configuration to the argv of sbatch, the jobs of a chain and the files of the run folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_helpers import FakeSlurm, config_of
from fake_slurm import job_line

from dist_transformer import files
from dist_transformer.cluster.slurm import PerhapsSubmitted, SlurmError, clean_environment, list_jobs, run_on_each_node
from dist_transformer.cluster.submit import Submission, note_job, plan_submission, submit
from dist_transformer.config.loading import load_config, with_absolute_paths
from dist_transformer.config.slurm_schema import STAGES
from dist_transformer.errors import ConfigError, MachineError
from dist_transformer.files import read_json, write_json
from dist_transformer.package_data import share_folder
from dist_transformer.run.folder import RunDir


def _plan(run_dir: RunDir, *stages: str, after: tuple[str, ...] = (), **settings: object) -> Submission:
    """What would be submitted, without asking Slurm."""
    config = config_of(data={"test": {"demo": "test"}}, **settings)
    return plan_submission(config, run_dir, stages=stages or ("train",), after=after, dry_run=True)


def _options(run_dir: RunDir, **settings: object) -> tuple[str, ...]:
    return _plan(run_dir, **settings).jobs[0].options


# ------------------------------------------------------------------------------------------------------------- argv


def test_the_arguments_of_sbatch_say_what_the_configuration_says(run_dir: RunDir) -> None:
    [job] = _plan(
        run_dir, nodes=2, ranks_per_node=4, gpus_per_node=4, cpus_per_rank=3, time_limit="1-02:03:04", signal_seconds=100,
        sbatch={"partition": "gpu", "account": "a b", "qos": "high", "constraint": "h200&ib", "mem": "10G",
                "exclude": ["n7", "n[1-2]"], "reservation": "x y", "exclusive": True, "mail-type": None, "hold": False},
    ).jobs  # fmt: skip
    arguments = job.sbatch_arguments()
    assert arguments[-2:] == [str(run_dir.submitted_script), str(run_dir.path)]
    assert set(arguments[:-2]) == {
        "--reservation=x y", "--exclusive",
        "--parsable", "--requeue", "--job-name=run", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3",
        "--gpus-per-node=4", "--mem=10G", "--time=1-02:03:04", "--partition=gpu", "--account=a b", "--qos=high",
        "--constraint=h200&ib", "--exclude=n7,n[1-2]", f"--comment=dist-transformer:{run_dir.path}",
        "--signal=B:USR1@100", "--open-mode=append", f"--output={run_dir.slurm}/job-%j.log",
    }  # fmt: skip


def test_gres_stands_in_the_place_of_gpus_per_node(run_dir: RunDir) -> None:
    options = _options(run_dir, ranks_per_node=8, gpus_per_node=8, sbatch={"gres": "gpu:h200:8"})
    assert "--gres=gpu:h200:8" in options
    assert not [option for option in options if option.startswith("--gpus")]


def test_nodes_that_the_run_has_excluded_by_itself_stay_excluded(run_dir: RunDir) -> None:
    write_json(run_dir.excluded, {"n3": "slow", "n7": "failed twice"})
    assert "--exclude=n7,n3" in _options(run_dir, sbatch={"exclude": "n7"})


def test_a_percent_sign_in_the_path_is_not_read_as_a_pattern_of_the_log(tmp_path: Path) -> None:
    assert f"--output={tmp_path}/50%%j/run/slurm/job-%j.log" in _options(RunDir(tmp_path / "50%j" / "run"))


def test_a_relative_run_folder_becomes_absolute_in_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [job] = _plan(RunDir(Path("runs/first"))).jobs
    assert job.arguments == (str(tmp_path / "runs" / "first"),)


def test_a_dry_run_creates_nothing_and_needs_no_slurm(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    submission = _plan(run_dir)
    assert submission.files.keys() == {run_dir.config, run_dir.submitted_script}
    assert not run_dir.path.exists()


def test_submitting_imports_nothing_heavy() -> None:
    program = (
        "import sys, dist_transformer.cli.submit\nprint(*({'torch', 'datasets', 'mlflow', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


# ------------------------------------------------------------------------------------------------------------ stages


def test_each_stage_waits_until_the_one_before_it_has_ended_well(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    ids = submit(_plan(run_dir, *STAGES, after=("7", "8_1")))
    assert ids == {"prepare": "4711", "train": "4712", "average": "4713", "evaluate": "4714"}
    waits = [[option for option in call if option.startswith(("--dep", "--kill"))] for call in fake_slurm.calls]
    killed = "--kill-on-invalid-dep=yes"
    assert waits == [
        ["--dependency=afterok:7:8_1", killed],
        ["--dependency=afterok:4711", killed],
        ["--dependency=afterok:4712", killed],
        ["--dependency=afterok:4713", killed],
    ]


def test_a_job_that_waits_for_none_has_no_dependency(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    submit(_plan(run_dir))
    assert not [option for option in fake_slurm.calls[0] if option.startswith(("--dep", "--kill"))]


def test_the_stages_beside_training_are_one_task_with_a_script_and_a_log_of_their_own(run_dir: RunDir) -> None:
    settings = {"nodes": 4, "ranks_per_node": 8, "gpus_per_node": 8, "cpus_per_rank": 6, "lanes": 32}
    prepare, train, average, evaluate = _plan(run_dir, *STAGES, **settings).jobs
    folder, path = run_dir.slurm, str(run_dir.path)
    assert [(job.script, job.arguments) for job in (prepare, train, average, evaluate)] == [
        (folder / "prepare.sbatch", (path,)),
        (folder / "train.sbatch", (path,)),
        (folder / "command.sbatch", ("average", path)),
        (folder / "command.sbatch", ("evaluate", path)),
    ]
    one_task = {"--nodes=1", "--ntasks-per-node=1"}
    assert one_task | {"--cpus-per-task=48", "--job-name=run-prepare", f"--output={folder}/prepare-%j.log"} <= {
        *prepare.options
    }
    assert not [option for option in prepare.options if "gpu" in option]
    for job, stage in ((average, "average"), (evaluate, "evaluate")):
        wanted = {
            "--cpus-per-task=6",
            "--gpus-per-node=1",
            f"--job-name=run-{stage}",
            f"--output={folder}/{stage}-%j.log",
        }
        assert one_task | wanted <= {*job.options}
    # The script of a training job tells its ranks; where there is nothing to decide, Slurm tells them itself.
    assert "--signal=B:USR1@180" in train.options
    assert "--signal=USR1@180" in prepare.options
    # They have no handler: the signal would end them early.
    assert not [option for job in (average, evaluate) for option in job.options if option.startswith("--signal")]
    assert "--signal" not in (share_folder("slurm") / "command.sbatch").read_text()


def test_one_gpu_of_a_gres_is_asked_for_and_the_rest_of_it_stays(run_dir: RunDir) -> None:
    [job] = _plan(
        run_dir, "evaluate", after=("7",), ranks_per_node=8, gpus_per_node=8, sbatch={"gres": "gpu:h200:8,nvme:400"}
    ).jobs
    assert "--gres=gpu:h200:1,nvme:400" in job.options


def test_all_stages_run_the_same_snapshot(run_dir: RunDir) -> None:
    scripts = [text for path, text in _plan(run_dir, *STAGES).files.items() if path.suffix == ".sbatch"]
    assert len(scripts) == 3
    assert all(f"\ncode={run_dir.snapshot}\n" in text for text in scripts)


def test_a_stage_that_has_nothing_to_score_is_refused_at_once(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"data\.test: is not given, and the stage evaluate scores it"):
        plan_submission(config_of(), run_dir, stages=("train", "evaluate"), dry_run=True)


def test_the_commands_of_a_dry_run_name_the_job_that_is_waited_for(run_dir: RunDir) -> None:
    first, second = _plan(run_dir, "prepare", "train", after=("5",)).commands
    assert "--dependency=afterok:5 " in first
    assert "--dependency=afterok:PREPARE " in second


def test_job_json_holds_the_training_job_and_those_of_the_stages(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    submit(_plan(run_dir, "prepare", "train", "average"))
    job = read_json(run_dir.job)
    assert (job["job_id"], job["stages"]) == ("4712", {"prepare": "4711", "train": "4712", "average": "4713"})
    assert str(run_dir.submitted_script) in job["command"]
    run_dir.model.mkdir()
    submit(_plan(run_dir, "evaluate"))  # the run's own job stays the one that trained it
    assert (read_json(run_dir.job)["job_id"], read_json(run_dir.job)["stages"]) == ("4712", {"evaluate": "4714"})


def test_the_job_of_a_run_folder_without_training_is_the_newest(run_dir: RunDir) -> None:
    """The job that `status` looks at: the training job, whatever is submitted after it."""
    for stages, job_id in (
        ({"translate": "1"}, "1"),
        ({"translate": "2"}, "2"),
        ({"train": "3", "evaluate": "4"}, "3"),
        ({"evaluate": "5"}, "3"),
        ({"evaluate": "6"}, "3"),
    ):
        note_job(run_dir, stages, "sbatch")
        assert read_json(run_dir.job)["job_id"] == job_id


def test_what_was_submitted_before_sbatch_refused_is_told_and_noted(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    (fake_slurm.folder / "real").write_text((fake_slurm.folder / "sbatch").read_text())
    fake_slurm.program(
        "sbatch", '[[ "$*" != *average* ]] || { echo "sbatch: error: no" >&2; exit 1; }; . "$(dirname "$0")/real"'
    )
    with pytest.raises(SlurmError, match=r"already submitted: 4711 \(prepare\), 4712 \(train\); .*: scancel 4711 4712"):
        submit(_plan(run_dir, *STAGES))
    assert read_json(run_dir.job)["stages"] == {"prepare": "4711", "train": "4712"}


def test_a_token_of_the_user_goes_to_the_controller_and_not_to_srun(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JWT", "token")
    for program in ("srun", "squeue"):
        fake_slurm.program(program, f'echo "{program} ${{SLURM_JWT-none}}"')
    assert run_on_each_node("1", 1, ["true"], {}) == ["srun none"]
    assert list_jobs(["1"], "%i") == ["squeue token"]


def test_what_was_submitted_before_sbatch_gave_no_answer_is_told_too(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    (fake_slurm.folder / "real").write_text((fake_slurm.folder / "sbatch").read_text())
    fake_slurm.program("sbatch", '[[ "$*" != *average* ]] || exit 0; . "$(dirname "$0")/real"')
    with pytest.raises(PerhapsSubmitted, match=r"expected a job id; [^\0]*already submitted: 4711 \(prepare\), 4712"):
        submit(_plan(run_dir, *STAGES))


# -------------------------------------------------------------------------------------------------------- submitting


def test_submitting_writes_the_run_folder_and_calls_sbatch_with_exactly_the_planned_arguments(
    run_dir: RunDir, fake_slurm: FakeSlurm
) -> None:
    write_json(run_dir.restarts, {"newest_checkpoint": None, "without_progress": 3})
    run_dir.stop_file.write_text("")
    submission = plan_submission(config_of(), run_dir)
    assert submit(submission) == {"train": "4711"}
    assert fake_slurm.calls == [submission.jobs[0].sbatch_arguments()]
    assert load_config(run_dir.config) == with_absolute_paths(config_of(), None)
    assert run_dir.submitted_script.read_text() == submission.files[run_dir.submitted_script]
    assert (run_dir.snapshot / "dist_transformer" / "__init__.py").is_file()
    job = read_json(run_dir.job)
    assert (job["job_id"], job["command"], "stages" in job) == ("4711", submission.commands[0], False)
    assert not run_dir.restarts.exists()
    assert not run_dir.stop_file.exists()


def test_a_script_is_for_its_owner_alone_from_the_first_moment_on(
    run_dir: RunDir, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, flush = list[tuple[str, int]](), files.flush_to_disk

    def looked_at(path: Path) -> None:
        modes.append((path.name.strip("."), path.stat().st_mode & 0o777))
        flush(path)

    monkeypatch.setattr(files, "flush_to_disk", looked_at)
    submit(_plan(run_dir))
    assert {mode for name, mode in modes if name.startswith("train.sbatch")} == {0o600}
    assert run_dir.submitted_script.stat().st_mode & 0o777 == 0o600
    assert (run_dir.snapshot / "slurm").is_dir()
    fake_slurm.program("sbatch", "exit 1")
    with pytest.raises(SlurmError):
        submit(_plan(run_dir, setup=["module load x"]))
    assert run_dir.submitted_script.stat().st_mode & 0o777 == 0o600, "the old one was put back"


def test_a_job_does_not_inherit_the_job_or_rank_it_was_submitted_from(
    run_dir: RunDir, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"SLURM_JOB_ID", "SRUN_DEBUG", "SBATCH_MEM_BIND", "MASTER_PORT", "RANK", "CUDA_VISIBLE_DEVICES"}
    own |= {"DIST_TRANSFORMER_PYTHON", "DIST_TRANSFORMER_KEEP_STOP", "OMP_NUM_THREADS"}
    own |= {"SBATCH_EXPORT", "SBATCH_WAIT", "SBATCH_TIMELIMIT", "SBATCH_OUTPUT", "SLURM_CLUSTERS"}
    for name in own:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("KEPT", "x y")
    submit(_plan(run_dir))
    [given] = fake_slurm.environments
    assert (given["SLURM_CONF"], given["KEPT"]) == ("/etc/slurm.conf", "x y")
    assert not given.keys() & own


def test_the_scrub_takes_whole_names_and_prefixes_only() -> None:
    kept = {"SLURM_CONF": "a", "MY_RANK": "b", "RANKS": "c", "PATH": "d", "SLURM_CONF_SERVER": "e", "SLURM_JWT": "f"}
    kept |= {f"SBATCH_{name}": "g" for name in ("ACCOUNT", "PARTITION", "QOS", "RESERVATION", "CONSTRAINT", "WCKEY")}
    assert clean_environment({**kept, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "n"}) == kept


def test_what_sbatch_says_against_a_job_is_what_the_user_reads(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.program("sbatch", 'echo "sbatch: error: invalid partition specified: gup" >&2; exit 1')
    with pytest.raises(SlurmError, match="sbatch refused: sbatch: error: invalid partition specified: gup\n  command:"):
        submit(_plan(run_dir))
    assert not run_dir.job.exists()


@pytest.mark.parametrize("said", ["", "Submitted batch job 5", "5 jobs", "error", "5;a b", "5\\n6"])
def test_an_answer_of_sbatch_that_is_no_job_id_is_not_taken_for_one(
    run_dir: RunDir, fake_slurm: FakeSlurm, said: str
) -> None:
    """The job may be there: its files stay, and no job is noted."""
    _must_leave_the_files(run_dir, fake_slurm, f"printf '{said}'")


def test_an_answer_of_sbatch_that_is_late_does_not_mean_that_there_is_no_job(
    run_dir: RunDir, fake_slurm: FakeSlurm
) -> None:
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    _must_leave_the_files(run_dir, fake_slurm, f"echo '{said}' >&2; exit 1")


def test_a_ctrl_c_while_sbatch_is_asked_does_not_mean_that_there_is_no_job(
    run_dir: RunDir, fake_slurm: FakeSlurm
) -> None:
    _must_leave_the_files(run_dir, fake_slurm, "kill -INT $PPID; exec sleep 600", answer=r"'\^C'")


def test_an_id_is_a_job_whatever_the_exit_code_says(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    """A site's wrapper may call sbatch with --wait: the exit code is then the job's."""
    fake_slurm.program("sbatch", "echo 7; exit 1")
    assert submit(_plan(run_dir)) == {"train": "7"}
    assert run_dir.submitted_script.is_file()


def _must_leave_the_files(run_dir: RunDir, fake_slurm: FakeSlurm, sbatch: str, answer: str = "") -> None:
    fake_slurm.program("sbatch", sbatch)
    with pytest.raises(MachineError, match=f"{answer}.*: expected a job id; look with `squeue --me`"):
        submit(_plan(run_dir))
    assert run_dir.submitted_script.is_file()
    assert not run_dir.job.exists()


@pytest.mark.parametrize("said", ["5", "5;cluster", "Dear user: welcome\\n5;cluster\\n"])
def test_the_id_is_found_behind_what_a_site_prints(run_dir: RunDir, fake_slurm: FakeSlurm, said: str) -> None:
    fake_slurm.program("sbatch", f"printf '{said}'")
    assert submit(_plan(run_dir)) == {"train": "5"}


def test_a_run_folder_on_which_a_job_works_is_refused(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    submit(_plan(run_dir, "train", "evaluate"))
    fake_slurm.set_jobs(job_line("4711", "RUNNING", comment=f"dist-transformer:{run_dir.path}") + "\n")
    with pytest.raises(
        ConfigError, match=r"cannot submit:\n.*job 4711 already works on it \(RUNNING\); wait for it, end"
    ):
        plan_submission(config_of(), run_dir)
    comment = f"dist-transformer:{run_dir.path}"
    fake_slurm.set_jobs(f"{job_line('4711', 'COMPLETED')}\n{job_line('4712', 'PENDING', 'Dependency', comment)}\n")
    with pytest.raises(ConfigError, match=r"job 4712 already works on it \(PENDING\)"):
        plan_submission(config_of(), run_dir)
    fake_slurm.set_jobs(f"{job_line('4711', 'COMPLETED')}\n{job_line('4712', 'COMPLETED')}\n")
    assert submit(plan_submission(config_of(), run_dir)) == {"train": "4713"}


def test_a_job_of_another_user_that_slurm_may_hide_is_told_before_a_second_one_is_submitted(
    run_dir: RunDir, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(_plan(run_dir))
    fake_slurm.set_jobs("")  # forgotten, or hidden
    submit(_plan(run_dir))
    assert capsys.readouterr().err == ""
    owner = run_dir.job.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert submit(_plan(run_dir)) == {"train": "4713"}
    assert "warning: Slurm shows no job 4712: it is over, or hidden from you: ask its owner" in capsys.readouterr().err


def test_without_sbatch_the_user_is_told_where_to_go(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="sbatch: not found on PATH; submit from a login node"):
        plan_submission(config_of(), run_dir)


def test_problems_that_the_caller_found_are_told_with_the_others(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_submission(config_of(lanes=1, nodes=2), run_dir, problems=["too large"], dry_run=True)
    assert [problem[:14] for problem in caught.value.problems] == ["too large", "slurm.nodes: 2"]
