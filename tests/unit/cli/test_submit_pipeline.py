"""`dist-transformer submit --pipeline` as a person calls it, with Slurm's commands replaced."""

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cluster_helpers import SBATCH, FakeSlurm, small_snapshot
from fake_slurm import job_line

from dist_transformer.cli import pipeline as pipeline_module
from dist_transformer.cli.pipeline import SUBMITTED, run_command, status_command, submit_pipeline
from dist_transformer.cluster import submit as cluster_submit
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.errors import ConfigError, UserError
from dist_transformer.files import write_json
from dist_transformer.pipeline.schema import read_pipeline
from dist_transformer.pipeline.state import configuration, states_of


@pytest.fixture(autouse=True)
def quick_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_submit, "take_snapshot", small_snapshot)


PIPELINE = """
root: {folder}/root
data_root: {folder}
set: {{data: {{train: {{demo: train}}}}, model: {{preset: tiny}}, tokenizer: {{vocabulary_size: 500}}}}
nodes:
  teacher: {{kind: train}}
  forward: {{kind: translate, model: {{node: teacher}}, input: mono}}
  kept: {{kind: filter, source: mono, target: {{node: forward}}, scores: scores}}
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    for name in ("mono", "scores"):
        (tmp_path / name).write_text("1\n2\n")
    (tmp_path / "pipeline.yaml").write_text(PIPELINE.format(folder=tmp_path))
    return tmp_path / "pipeline.yaml"


def test_a_pipeline_that_lies_in_its_own_folder_stays_as_its_user_wrote_it(
    pipeline: Path, fake_slurm: FakeSlurm
) -> None:
    file = pipeline.parent / "root" / "pipeline.yaml"
    file.parent.mkdir()
    text = pipeline.rename(file).read_text()
    fake_slurm.set_jobs(job_line("9", "PENDING") + "\n")
    submit_pipeline(file, ["nodes.kept.drop=0.2"], ("9",), dry_run=False)
    assert file.read_text() == text
    command, run, copy, *rest = fake_slurm.calls[2][-5:]
    assert (command, run, rest, read_pipeline(Path(copy)).nodes["kept"].values["drop"]) == (
        *("pipeline", "run", ["--node", "kept"]),
        0.2,
    )
    assert {state.state for state in states_of(read_pipeline(file, ["nodes.kept.drop=0.2"])).values()} == {"begun"}


def test_a_job_reads_configurations_as_they_were_when_it_was_submitted(pipeline: Path, fake_slurm: FakeSlurm) -> None:
    config = pipeline.parent / "teacher.yaml"
    config.write_text("decoding: {beam_size: 8}\n")
    submit_pipeline(pipeline, ["nodes.teacher.config=teacher.yaml"], (), dry_run=False)
    config.write_text("decoding: {beam_size: 2}\n")
    copy = read_pipeline(pipeline.parent / "root" / "kept" / "slurm" / "pipeline.yaml")
    assert configuration(copy, "teacher").decoding.beam_size == 8


def test_text_that_changed_in_the_queue_does_not_count_as_that_which_was_submitted(
    pipeline: Path, fake_slurm: FakeSlurm
) -> None:
    given = ("nodes.kept.target=mono",)
    submit_pipeline(pipeline, [*given], (), dry_run=False)
    (pipeline.parent / "mono").write_text("2\n1\n")
    with pytest.raises(UserError, match="node kept: mono changed while it ran; start the same command again"):
        run_command(pipeline.parent / "root" / "kept" / "slurm" / "pipeline.yaml", None, "kept")
    assert states_of(read_pipeline(pipeline, [*given]))["kept"].why == "changed: mono"


SLURM = {
    "sbatch={output: x, array: 1-2, dependency: afterok:1, nodes: 2}": [
        "sbatch.output",
        "sbatch.array",
        "use submit --after",
    ],
    "environment.MLFLOW_TRACKING_PASSWORD=secret": ["environment.MLFLOW_TRACKING_PASSWORD: looks like a secret"],
    "environment.PYTHONPATH=x": ["environment.PYTHONPATH: is set by the batch script"],
    "time_limit=2:00": ["time_limit: 2:00 is 120 s, but the job is signalled to save 180 s before its end"],
    "container_mounts=[/x]": ["container_mounts: are given without slurm.container_image"],
    "environment=[secret]": ["environment: expected `key: value` lines below it"],
}


@pytest.mark.slow
@pytest.mark.parametrize("given", SLURM)
@pytest.mark.parametrize("dry_run", [True, False])
def test_the_settings_of_every_job_of_a_pipeline_are_checked_before_anything_is_changed(
    given: str, dry_run: bool, pipeline: Path, fake_slurm: FakeSlurm
) -> None:
    submit_pipeline(pipeline, [], (), dry_run=False)
    before = sorted(pipeline.parent.rglob("*"))
    anew = "nodes.forward.beam=5"
    for node in ("forward", "kept"):
        with pytest.raises(ConfigError) as caught:
            submit_pipeline(pipeline, [anew, f"nodes.{node}.slurm.{given}"], (), dry_run=dry_run)
        for words in SLURM[given]:
            assert sum(words in problem for problem in caught.value.problems) == 1, caught.value.problems
        assert all(problem.startswith(f"node {node}: ") for problem in caught.value.problems)
        assert "secret'" not in str(caught.value)
    assert (sorted(pipeline.parent.rglob("*")), len(fake_slurm.calls)) == (before, 3)


def test_text_that_does_not_fit_together_is_told_before_anything_is_renamed(
    pipeline: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lines in (("x", 3), ("y", 2)):
        (pipeline.parent / name).write_text("a b c\n" * lines)
    submit_pipeline(pipeline, [], (), dry_run=False)
    root = pipeline.parent / "root"
    shutil.rmtree(root / "teacher" / "slurm")
    before = sorted(root.rglob("*"))
    monkeypatch.setattr(pipeline_module, "run_due", lambda *_: 75)
    monkeypatch.setattr(pipeline_module, "_jobs_of", lambda *_: {})
    place = f"nodes.teacher.set.data.test={{source: {pipeline.parent}/x, target: {pipeline.parent}/y}}"
    for start in (partial(submit_pipeline, after=(), dry_run=False), run_command):
        with pytest.raises(ConfigError) as caught:
            start(pipeline, [place])
        [problem] = caught.value.problems
        assert "data.test: " in problem or f"{pipeline.parent}/x has 3 lines" in problem, problem
    assert sorted(root.rglob("*")) == before


def test_nodes_in_containers_see_the_files_that_they_name(
    pipeline: Path, tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "mono").write_text("1\n2\n")
    given = [f"data_root={tmp_path}/data", "set.slurm.container_image=i", f"nodes.forward.input={tmp_path}/far/mono"]
    given += [f"nodes.kept.{key}={tmp_path}/{key}" for key in ("scores",)] + [f"nodes.kept.source={tmp_path}/far/mono"]
    submit_pipeline(pipeline, given, (), dry_run=False)
    script = (tmp_path / "root" / "forward" / "slurm" / "translate.sbatch").read_text()
    assert f"{tmp_path}/data:{tmp_path}/data,{tmp_path}/far:{tmp_path}/far " in f"{script} ".replace("'", " ").replace(
        "\n", " "
    )


def test_problems_of_all_nodes_are_told_at_once(pipeline: Path, fake_slurm: FakeSlurm) -> None:
    with pytest.raises(ConfigError, match="cannot submit:") as caught:
        submit_pipeline(pipeline, ["set.slurm.time_limit=2:00"], (), dry_run=True)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["node teacher", "node forward", "node kept"]


def test_a_dry_run_of_a_pipeline_shows_the_nodes_that_begin_anew(
    pipeline: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_pipeline(pipeline, [], (), dry_run=False)
    write_json(pipeline.parent / "root" / "teacher" / "run.json", {"state": "finished", "step": 10**9})
    before = sorted(pipeline.parent.rglob("*"))
    for changed in ("set.training.max_steps=4000", "nodes.teacher.set.data.lanes=9"):
        capsys.readouterr()
        submit_pipeline(pipeline, [changed], ("9",), dry_run=True)
        shown = capsys.readouterr().out
        for name, waits in (("teacher", "9"), ("forward", "TEACHER"), ("kept", "FORWARD")):
            assert f"# {name} begins anew: its folder is kept under another name" in shown
            assert f"--dependency=afterok:{waits} " in shown
            assert shown.count(f"/root/{name}/slurm/snapshot\n") == 1
    assert sorted(pipeline.parent.rglob("*")) == before
    submit_pipeline(pipeline, [changed], (), dry_run=False)
    assert {path.name for path in (pipeline.parent / "root").glob("*.1")} == {"teacher.1", "forward.1", "kept.1"}


def test_what_a_limit_of_the_queue_left_of_a_pipeline_is_submitted_while_its_jobs_wait(
    pipeline: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    fake_slurm.program(
        "sbatch", f'cd "$(dirname "$0")"; [ ! -e call-0.argv ] || {{ echo "{refusal}" >&2; exit 1; }}{SBATCH}'
    )
    with pytest.raises(
        SlurmError, match=r"(?s)node forward: .*submit again when jobs of yours have ended.*already submitted; to"
    ):
        submit_pipeline(pipeline, [], (), dry_run=False)
    fake_slurm.program("sbatch", SBATCH)
    comment = f"dist-transformer:{pipeline.parent}/root/teacher"
    fake_slurm.set_jobs(job_line("4711", "PENDING", comment=comment) + "\n" + job_line("9", "PENDING") + "\n")
    with pytest.raises(ConfigError, match="teacher: job 4711 pending works on it"):  # it would begin anew
        submit_pipeline(pipeline, ["nodes.teacher.set.data.lanes=9"], (), dry_run=False)
    submit_pipeline(pipeline, [], ("9",), dry_run=False)
    waits = [word for call in fake_slurm.calls for word in call if word.startswith("--dependency")]
    assert waits == ["--dependency=afterok:4711", "--dependency=afterok:4712"]
    assert "submitted job 4713: kept (filter)\n2 jobs for 3 nodes" in capsys.readouterr().out
    lines = zip(("4711", "4712", "4713"), ("teacher", "forward", "kept"), strict=True)
    of_nodes = [job_line(each, "PENDING", comment=comment.replace("teacher", name)) for each, name in lines]
    fake_slurm.set_jobs("\n".join(of_nodes) + "\n")
    with pytest.raises(ConfigError, match="forward: job 4712 pending works on it"):  # nothing is left to submit
        submit_pipeline(pipeline, [], (), dry_run=False)
    fake_slurm.set_jobs(of_nodes[1] + "\n")  # the job before it has failed: it will be taken back
    with pytest.raises(ConfigError, match=r"cannot submit:\s+forward: job 4712 pending works on it"):
        submit_pipeline(pipeline, [], (), dry_run=False)


def test_a_job_of_another_file_with_this_root_keeps_the_folders_of_the_nodes_that_it_reads(
    pipeline: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_pipeline(pipeline, [], (), dry_run=False)
    monkeypatch.setattr(pipeline_module, "run_due", lambda *_: 75)
    root, other = pipeline.parent / "root", pipeline.parent / "other.yaml"
    other.write_text("".join(pipeline.read_text().partition("  forward:")[:1]))
    job = job_line("4712", "PENDING", comment=f"dist-transformer:{root}/forward")
    fake_slurm.set_jobs(job + "\n")
    given = ["nodes.teacher.set.data.lanes=9"]
    with pytest.raises(ConfigError, match=r"cannot submit:\s+forward: job 4712 pending works on it"):
        submit_pipeline(other, given, (), dry_run=False)
    with pytest.raises(UserError, match=r"root: job 4712 pending works on it"):
        run_command(other, given)
    assert not [*root.glob("*.1")]
    fake_slurm.set_jobs("")
    submit_pipeline(other, given, (), dry_run=False)
    assert {path.name for path in root.glob("*.1")} == {"teacher.1"}


def test_a_pipeline_is_neither_submitted_twice_nor_run_while_slurm_does_not_answer(
    pipeline: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.program(
        "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1"
    )  # no node has a job: not asked
    submit_pipeline(pipeline, [], (), dry_run=False)
    before = sorted(pipeline.parent.rglob("*"))
    monkeypatch.setattr(pipeline_module, "run_due", lambda *_: 75)
    for begin in (partial(submit_pipeline, after=(), dry_run=False), run_command):
        for given in ([], ["nodes.forward.beam=5"]):  # with which it begins anew
            with pytest.raises(SlurmError, match="squeue refused: Unable to contact slurm controller"):
                begin(pipeline, given)
    assert (sorted(pipeline.parent.rglob("*")), len(fake_slurm.calls)) == (before, 3)
    status_command(pipeline)
    said = capsys.readouterr()
    assert "| translate | stopped |" in said.out
    assert said.err == "Slurm was not asked: squeue refused: Unable to contact slurm controller\n"
    monkeypatch.setenv("PATH", "")  # as on a machine without Slurm
    with pytest.raises(SystemExit, match="75"):
        run_command(pipeline)


def test_the_jobs_of_a_colleague_which_squeue_hides_keep_their_folders(
    pipeline: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PrivateData=jobs; where the accounts hide them too, nobody can tell them from those that are over."""
    submit_pipeline(pipeline, [], (), dry_run=False)
    before, owner = sorted(pipeline.parent.rglob("*")), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    monkeypatch.setattr(pipeline_module, "run_due", lambda *_: 75)
    line = f"$id|$id|PENDING|Unknown|1|None assigned|main|1795307143|0:0|{owner}|"
    fake_slurm.program("sacct", f'[[ "$*" =~ --jobs=([0-9]+) ]]; id=${{BASH_REMATCH[1]}}; echo "{line}"')
    for given in ([], ["nodes.forward.beam=5"]):
        with pytest.raises(UserError, match=r"job 471[123] pending works on it"):
            run_command(pipeline, given)
        with pytest.raises(ConfigError, match=r"(?s)cannot submit:.*forward: job 4712 pending works on it"):
            submit_pipeline(pipeline, given, (), dry_run=False)
    status_command(pipeline)
    assert "| forward | translate | job 4712 pending |" in capsys.readouterr().out
    added = {path.name for path in {*pipeline.parent.rglob("*")} - {*before}}
    assert ([path for path in before if not path.exists()], added) == ([], {"sacct"})
    read = read_pipeline(pipeline)
    done = {name: replace(state, is_due=False) for name, state in states_of(read).items()}
    assert pipeline_module._jobs_of(read, done) == {}, "the accounts are not asked for the jobs of nodes that are done"
    fake_slurm.program("sacct", "")
    with pytest.raises(SystemExit, match="75"):
        run_command(pipeline, ["nodes.forward.beam=5"])
    said = capsys.readouterr().err
    assert "warning: node forward: Slurm shows no job 4712: it is over, or hidden from you: ask its owner" in said


def test_a_job_finds_the_text_of_a_configuration_that_has_a_folder_of_its_own(
    pipeline: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pipeline.parent)
    Path("text").mkdir()
    shutil.copy("mono", "text/en")
    Path("base.yaml").write_text("data: {root: text, train: {source: en, target: en}}\n")
    Path("p.yaml").write_text(
        "root: root\nnodes:\n  teacher: {kind: train, config: base.yaml}\n"
        "  forward: {kind: translate, model: {node: teacher}, input: mono}\n"
    )
    submit_pipeline(Path("p.yaml"), [], (), dry_run=False)
    job = read_pipeline(pipeline.parent / "root" / "forward" / SUBMITTED)
    assert configuration(job, "teacher").data.root == str(pipeline.parent / "text")
