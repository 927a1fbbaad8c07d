"""A submission that sbatch refuses leaves the run folder as it was, and a second one at the same time changes nothing."""

import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import SBATCH, FakeSlurm, config_of
from fake_slurm import job_line

from dist_transformer.cluster import submit as cluster_submit
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.cluster.submit import Submission, plan_submission, submit
from dist_transformer.config.schema import Config
from dist_transformer.errors import ConfigError, MachineError, UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir

REFUSES = 'echo "sbatch: error: invalid partition" >&2; exit 1'


@pytest.fixture(autouse=True)
def numbered_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each snapshot is another one."""
    numbers = iter(range(100))

    def take(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "code.py").write_text(str(next(numbers)))

    monkeypatch.setattr(cluster_submit, "take_snapshot", take)


def _files(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def _planned(config: Config, text: str, run_dir: RunDir, **how: Any) -> Submission:
    """A submission that writes `text` as the configuration."""
    submission = plan_submission(config, run_dir, **how)
    return replace(submission, files={**submission.files, submission.run_dir.config: text})


def _submit(run_dir: RunDir, text: str, *stages: str, **slurm: object) -> dict[str, str]:
    config = config_of(data={"test": {"demo": "test"}}, **slurm)
    return submit(_planned(config, text, run_dir, stages=stages or ("train",), dry_run=True))


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("Unable to contact slurm controller (connect failure)", "the controller does not answer: submit again later"),
        ("QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job "
         "submit limit, user's size and/or time limits)", "submit again when jobs of yours have ended, or ask for less "),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
         "change slurm (nodes, time_limit, "),
        ("Slurm temporarily unable to accept job, sleeping and retrying\nsbatch: error: Batch job submission failed: Resource "
         "temporarily unavailable", "the queue is full (MaxJobCount), or the controller busy: submit again when jobs have ended"),
        ("Batch job submission failed: Invalid feature specification", "correct slurm.sbatch (constraint, reservation): "),
        ("Batch job submission failed: Requested reservation is invalid", "correct slurm.sbatch (constraint, reservation): "),
        ("Batch job submission failed: Access denied to requested reservation", "correct slurm.sbatch (constraint, reservation)"),
        ("fatal: Could not establish a configuration source", "correct SLURM_CONF, or submit from a login node"),
        ("fatal: Unable to process configuration file", "correct SLURM_CONF, or submit from a login node"),
        ("fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.", "slurm.sbatch (partition, qos, mem, gres)"),
        ("Batch job submission failed: Invalid account or account/partition combination specified",
         "correct slurm.sbatch (account, partition, qos): `sacctmgr"),
        ("Batch job submission failed: Invalid qos specification", "correct slurm.sbatch (account, partition, qos): `sacctmgr"),
        ("Batch job submission failed: Pathname of a file, directory or other parameter too long", "choose a shorter run.root"),
        ("Batch job submission failed: Invalid node name specified", "RUN/slurm/excluded.json has a lost node, delete it"),
    ],
)  # fmt: skip
def test_a_refusal_is_followed_by_the_advice_for_it(
    run_dir: RunDir, fake_slurm: FakeSlurm, said: str, advice: str
) -> None:
    fake_slurm.program("sbatch", f'echo "sbatch: error: {said}" >&2; exit 1')
    with pytest.raises(SlurmError) as caught:
        _submit(run_dir, "new")
    assert advice in str(caught.value)
    assert "change slurm.sbatch (" not in str(caught.value)


def test_what_was_there_before_a_refusal_is_there_after_it(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    _submit(run_dir, "first")
    write_json(run_dir.restarts, {"newest_checkpoint": None, "without_progress": 3})
    run_dir.stop_file.write_text("")
    before = _files(run_dir.path)
    fake_slurm.program("sbatch", REFUSES)
    with pytest.raises(SlurmError) as caught:
        _submit(run_dir, "second", sbatch={"partition": "gup"})
    assert str(caught.value).startswith("sbatch refused: sbatch: error: invalid partition\n  command: sbatch ")
    assert str(caught.value).endswith(
        "\n  change slurm (nodes, time_limit, cpus_per_rank, gpus_per_node), slurm.sbatch (partition, qos, mem, gres); see "
        "sinfo; nothing was changed in the run folder"
    )
    assert _files(run_dir.path) == before


def test_a_run_folder_that_was_not_there_is_not_there_after_a_refusal(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.program("sbatch", REFUSES)
    with pytest.raises(SlurmError):
        _submit(RunDir(tmp_path / "runs" / "new"), "first")
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work as two others")
@pytest.mark.parametrize("answer", [SBATCH, REFUSES], ids=["accepted", "refused"])
def test_a_colleague_in_a_shared_folder_submits_what_another_has_submitted(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """Without the right to read the script of the other, which is put back after a refusal."""
    shared = Path(tempfile.mkdtemp())  # that of pytest is closed to others
    run_dir = RunDir(shared / "run")
    _submit(run_dir, "first")
    for name, body in (("sbatch", answer), ("squeue", "")):
        FakeSlurm(shared).program(name, body)
    monkeypatch.setenv("PATH", f"{shared}:{os.environ['PATH']}")
    before = _files(run_dir.path)
    for path in (shared, *shared.rglob("*")):
        path.chmod(0o600 if path.suffix == ".sbatch" else 0o777)
    try:
        os.seteuid(12345)
        try:
            _submit(run_dir, "second")
            _submit(run_dir, "third")  # what is left of the first one's snapshot, nobody else may remove
            refused = False
        except SlurmError as error:
            refused = "invalid partition" in str(error)
    finally:
        os.seteuid(0)
    assert refused == (answer == REFUSES)
    assert _files(run_dir.path) == before if refused else run_dir.config.read_text() == "third"
    shutil.rmtree(shared)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MachineError("full"), KeyboardInterrupt()])
def test_a_disk_that_refuses_a_file_or_ctrl_c_before_sbatch_changes_nothing_either(
    run_dir: RunDir, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    _submit(run_dir, "first")
    before = _files(run_dir.path)

    def full(folder: Path) -> None:
        folder.mkdir()
        raise error

    monkeypatch.setattr(cluster_submit, "take_snapshot", full)
    with pytest.raises(type(error)):
        _submit(run_dir, "second")
    assert _files(run_dir.path) == before


def test_a_job_that_starts_at_once_finds_its_files_and_no_old_stop(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    run_dir.path.mkdir()
    run_dir.stop_file.write_text("")
    fake_slurm.program("sbatch", f"[[ ! -e {run_dir.stop_file} && -s {run_dir.config} ]] || exit 1\n{SBATCH}")
    assert _submit(run_dir, "first") == {"train": "4711"}
    assert not run_dir.stop_file.exists()
    assert _submit(run_dir, "second") == {"train": "4712"}
    assert sorted(path.name for path in run_dir.slurm.iterdir()) == ["job.json", "snapshot", "train.sbatch"]


def test_what_a_job_was_submitted_with_stays_when_the_next_stage_is_refused(
    run_dir: RunDir, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.program("sbatch", f'[[ "$*" != *evaluate* ]] || {{ {REFUSES}; }}\n{SBATCH}')
    with pytest.raises(SlurmError, match="see sinfo\n  already submitted: 4711") as caught:
        _submit(run_dir, "first", "train", "evaluate")
    assert "nothing was changed" not in str(caught.value)
    assert run_dir.config.read_text() == "first"
    assert (run_dir.snapshot / "code.py").is_file()


@pytest.mark.parametrize("end", [SBATCH, REFUSES], ids=["accepted", "refused"])
def test_a_second_submit_during_the_first_is_refused_and_changes_nothing(
    run_dir: RunDir, fake_slurm: FakeSlurm, end: str
) -> None:
    _submit(run_dir, "first")
    before = _files(run_dir.path)
    called, answer = fake_slurm.folder / "called", fake_slurm.folder / "answer"
    fake_slurm.program("sbatch", f"! mkdir {called} || until [ -e {answer} ]; do sleep 0.05; done\n{end}")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(_submit, run_dir, "second")
        while not (called.exists() or second.done()):
            time.sleep(0.01)
        try:
            with pytest.raises(UserError, match="run: another submit works on this run folder; wait until") as refused:
                _submit(run_dir, "third")
        finally:
            answer.touch()
    assert refused.value.exit_code == 2
    if end == REFUSES:
        assert isinstance(second.exception(), SlurmError)
        assert _files(run_dir.path) == before
    else:
        assert second.result() == {"train": "4712"}
        assert (run_dir.config.read_text(), read_json(run_dir.job)["job_id"]) == ("second", "4712")
        assert (run_dir.snapshot / "code.py").is_file()
        assert _files(run_dir.path).keys() == before.keys()


def test_a_job_that_was_submitted_after_the_checks_is_found_before_anything_is_written(
    run_dir: RunDir, fake_slurm: FakeSlurm
) -> None:
    planned = [_planned(config_of(), text, run_dir) for text in ("first", "second")]
    submit(planned[0])
    fake_slurm.set_jobs(job_line("4711", "PENDING", comment=f"dist-transformer:{run_dir.path}") + "\n")
    with pytest.raises(ConfigError, match=r"cannot submit:\n.*job 4711 already works on it \(PENDING\)"):
        submit(planned[1])
    assert run_dir.config.read_text() == "first"
