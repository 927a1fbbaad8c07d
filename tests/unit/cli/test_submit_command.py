"""`dist-transformer submit` as a person calls it, with Slurm's commands replaced."""

import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import SBATCH, FakeSlurm, small_snapshot
from fake_slurm import job_line

import dist_transformer
from dist_transformer.cli import pipeline as pipeline_module
from dist_transformer.cli import submit as submit_module
from dist_transformer.cli.pipeline import run_command, status_command, submit_pipeline
from dist_transformer.cli.submit import read_job_ids, read_stages, submit_run
from dist_transformer.cluster import submit as cluster_submit
from dist_transformer.cluster.checks import memory_problems
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.config.loading import load_config, with_absolute_paths
from dist_transformer.data.sources.first_pairs import first_pairs_problems
from dist_transformer.errors import ConfigError, UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.pipeline.schema import read_pipeline
from dist_transformer.pipeline.state import configuration, states_of
from dist_transformer.run.folder import RunDir


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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{name: a_run, root: {tmp_path}/runs}}\n"
        "data: {train: {demo: train}, test: {demo: test}}\n"
        "model: {preset: tiny}\ntokenizer: {vocabulary_size: 500}\n"
    )
    return path


def test_the_job_the_folder_the_log_and_the_commands_to_type_are_printed(
    config: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_run(config, [])
    folder = config.parent / "runs" / "a_run"
    assert capsys.readouterr().out == (
        f"submitted job 4711; run folder {folder}\n"
        "job:    1 node x 1 rank, CPUs only (slurm.gpus_per_node is 0), time limit 24:00:00\n"
        f"log:    {folder}/slurm/job-4711.log\n"
        f"watch:  dist-transformer status {folder}\n"
        f"        dist-transformer logs {folder} --follow\n"
        f"stop:   dist-transformer stop {folder}  # saves first\n"
        f"cancel: dist-transformer cancel {folder}  # at once\n"
    )


def test_every_path_of_the_kept_configuration_is_absolute(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = config.parent
    monkeypatch.chdir(folder)
    (folder / "pieces.model").touch()
    overrides = ["run.root=runs", "data.root=text", "data.prepared=corpus", "training.init_from=first"]
    given = load_config(config, [*overrides, "tokenizer.source_model=pieces.model"], check_files=False)
    kept = with_absolute_paths(given, None)
    assert kept.run.root == f"{folder}/runs"
    assert (kept.data.root, kept.data.prepared) == (f"{folder}/text", f"{folder}/corpus")
    assert kept.training.init_from == f"{folder}/first"
    assert (kept.tokenizer.source_model, kept.tokenizer.target_model) == (f"{folder}/pieces.model", None)


def test_the_jobs_of_a_chain_are_printed_in_their_order(
    config: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_run(config, [], stages=("prepare", "train", "evaluate"), after=("9",))
    first, _, _, log, *_ = capsys.readouterr().out.splitlines()
    assert first == "submitted job 4711 (prepare), job 4712 (train), job 4713 (evaluate), each after the one before"
    assert log.endswith("/slurm/job-4712.log")
    assert "--dependency=afterok:9" in fake_slurm.calls[0]


def test_a_run_folder_is_gone_on_with_under_its_own_configuration(config: Path, fake_slurm: FakeSlurm) -> None:
    submit_run(config, ["training.max_steps=7000", "run.seed=5"])
    run_dir = RunDir(config.parent / "runs" / "a_run")
    fake_slurm.set_jobs(job_line("4711", "COMPLETED") + "\n")
    submit_run(run_dir.path, ["training.max_steps=8000"])
    assert read_json(run_dir.job)["job_id"] == "4712"
    kept = load_config(run_dir.config)
    assert (kept.training.max_steps, kept.run.seed) == (8000, 5)


def test_a_folder_with_an_odd_name_is_printed_so_that_it_can_be_pasted(
    config: Path, fake_slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "it's $(touch executed) ü"
    submit_run(config, [f"run.root={root}"])
    printed = [shlex.split(line, comments=True) for line in capsys.readouterr().out.splitlines()[2:]]
    folder = str(root / "a_run")
    assert printed == [
        ["log:", f"{folder}/slurm/job-4711.log"],
        ["watch:", "dist-transformer", "status", folder],
        ["dist-transformer", "logs", folder, "--follow"],
        ["stop:", "dist-transformer", "stop", folder],
        ["cancel:", "dist-transformer", "cancel", folder],
    ]
    assert fake_slurm.calls[0][-1] == str(root / "a_run")
    assert not list(tmp_path.rglob("executed"))


@pytest.mark.parametrize(
    "name", ["two words", "it's", 'say "hi"', "$(touch executed)", "`x`", "ü", "-x", "a;b", "a\nb", "%a"]
)
def test_an_odd_run_name_is_refused_before_anything_is_made(config: Path, fake_slurm: FakeSlurm, name: str) -> None:
    with pytest.raises(ConfigError, match="expected letters, digits"):
        submit_run(config, [f"run.name={name}"])
    assert fake_slurm.calls == []
    assert not (config.parent / "runs").exists()


def test_a_dry_run_prints_every_command_and_every_script_and_submits_nothing(
    config: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_run(config, [], stages=("train", "average"), dry_run=True)
    printed = capsys.readouterr().out
    assert printed.startswith(
        "# 1 node x 1 rank, CPUs only (slurm.gpus_per_node is 0), time limit 24:00:00\n\n# command"
    )
    assert printed.count("# command (the files below must be written first)\nsbatch --parsable") == 2
    for name in ("config.yaml", "slurm/train.sbatch", "slurm/command.sbatch"):
        assert f"# {config.parent}/runs/a_run/{name}\n" in printed
    assert fake_slurm.calls == []


def test_what_does_not_fit_the_gpus_is_told_with_the_other_problems(
    config: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cluster_submit, "memory_problems", lambda given: [f"{given.slurm.gpu_memory_gb} GB are too few"]
    )
    with pytest.raises(ConfigError) as caught:
        submit_run(config, ["slurm.gpu_memory_gb=8", "slurm.gpus_per_node=1", "slurm.time_limit='1:00'"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["8.0 GB are too few", "slurm.time_limit"]


def test_the_size_of_the_job_is_told(config: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    several = ["slurm.nodes=2", "slurm.ranks_per_node=4", "slurm.gpus_per_node=4", "slurm.time_limit='1:00:00'"]
    submit_run(config, several)
    assert "job:    2 nodes x 4 ranks, one GPU each, time limit 1:00:00\n" in capsys.readouterr().out
    RunDir(config.parent / "runs" / "a_run").model.mkdir()
    submit_run(config, several, stages=("evaluate",))  # which is one task
    assert "job:  " not in capsys.readouterr().out


GOOD = [f"a word of line {line}" for line in range(30)]


def _first_pairs(folder: Path, source: list[str], target: list[str], *overrides: str) -> list[str]:
    for name, lines in (("train.en", source), ("train.de", target)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    path = folder / "files.yaml"
    path.write_text(f"data: {{root: {folder}, train: {{source: train.en, target: train.de}}}}\n")
    return first_pairs_problems(load_config(path, list(overrides)))


@pytest.mark.parametrize(
    ("source", "target", "overrides", "counts"),
    [
        (GOOD, GOOD, ["data.filters.drop_identical=true"], "identical 30"),
        (GOOD, [""] * 30, [], "empty 30"),
        (GOOD, ["x " * 99] * 30, ["data.filters.max_tokens=99"], "too_long 30"),
        (GOOD, [*[""] * 10, *["x " * 99] * 20], ["data.filters.max_tokens=99"], "empty 10, too_long 20"),
        ([*GOOD, *["a"] * 1970, "good"], [*[""] * 2000, "gut"], [], "empty 2000"),
    ],
)
def test_filters_that_leave_nothing_of_the_first_pairs_are_told_before_the_job_waits(
    tmp_path: Path, source: list[str], target: list[str], overrides: list[str], counts: str
) -> None:
    [problem] = _first_pairs(tmp_path, source, target, *overrides)
    count = min(len(source), 2000)
    assert problem.startswith(f"data.filters: all of the first {count} pairs of ")
    assert f"would be dropped ({counts}); look at the text" in problem


def test_filters_that_leave_a_pair_are_none_of_submits_business(tmp_path: Path) -> None:
    assert _first_pairs(tmp_path, GOOD, ["", *GOOD[1:]]) == []
    assert _first_pairs(tmp_path, GOOD, ["x " * 98] * 30, "data.filters.max_tokens=99") == []
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "manifest.json").touch()
    assert _first_pairs(tmp_path, GOOD, [""] * 30, f"data.prepared={tmp_path}/prepared") == []


def test_a_text_that_cannot_be_read_is_told_with_the_other_problems(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    [problem] = _first_pairs(tmp_path, GOOD, GOOD[:-1])
    assert "train.de" in problem
    with pytest.raises(ConfigError) as caught:
        submit_run(tmp_path / "files.yaml", ["slurm.time_limit='1:00'", f"run.root={tmp_path}"])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("given", [["slurm.gpus_per_node=1"], ["slurm.gpu_memory_gb=0.0001"]])
def test_memory_is_estimated_only_for_gpus_whose_size_is_known(config: Path, given: list[str]) -> None:
    assert memory_problems(load_config(config, given)) == []


def test_stages_are_read_in_their_order_only() -> None:
    assert read_stages(["prepare", "train", "evaluate"]) == ("prepare", "train", "evaluate")
    for text in ("", "train,prepare", "train,train", "tran", "train,,average"):
        with pytest.raises(
            UserError, match="expected some of prepare,train,average,evaluate, each once and in this order"
        ):
            read_stages(text.split(","))


def test_ids_of_jobs_are_nothing_else() -> None:
    assert read_job_ids(["12", "13_4"]) == ("12", "13_4")
    assert read_job_ids([]) == ()
    for text in ("a", "12,", "12 13", "12;x", "-1", "12:13", "१२"):
        with pytest.raises(UserError, match="expected ids of jobs"):
            read_job_ids(text.split(","))


@pytest.mark.parametrize("stages", [("trian",), "train", ("train", "prepare"), ("train", "train"), (), None])
def test_stages_from_python_are_checked_before_sbatch_is_called(
    config: Path, fake_slurm: FakeSlurm, stages: Any
) -> None:
    with pytest.raises(UserError, match="stages: expected some of prepare,train,average,evaluate"):
        dist_transformer.submit(config, stages)
    assert fake_slurm.calls == []


@pytest.mark.parametrize("after", ["123", [123], ["12,13"], None])
def test_ids_of_jobs_from_python_are_checked_before_sbatch_is_called(
    config: Path, fake_slurm: FakeSlurm, after: Any
) -> None:
    with pytest.raises(UserError, match="after: expected ids of jobs, each a text"):
        dist_transformer.submit(config, after=after)
    assert fake_slurm.calls == []
    assert read_job_ids({"12": 1}.keys()) == read_job_ids(iter(["12"])) == ("12",)


def test_stages_of_a_pipeline_are_refused_and_a_run_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--stages train,evaluate: the nodes of a pipeline are its stages"):
        submit_module.submit_command(pipeline=tmp_path / "any.yaml", stages="train,evaluate")
    with pytest.raises(UserError, match="expected a YAML file or a run folder"):
        submit_module.submit_command()


def test_a_pipeline_that_lies_in_its_own_folder_stays_as_its_user_wrote_it(
    pipeline: Path, fake_slurm: FakeSlurm
) -> None:
    file = pipeline.parent / "root" / "pipeline.yaml"
    file.parent.mkdir()
    text = pipeline.rename(file).read_text()
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
    monkeypatch.setattr(pipeline_module, "_jobs_of", lambda _: {})
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
    fake_slurm.set_jobs(job_line("4711", "PENDING", comment=comment) + "\n")
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
    assert "| translate | stopped |" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "")  # as on a machine without Slurm
    with pytest.raises(SystemExit, match="75"):
        run_command(pipeline)
