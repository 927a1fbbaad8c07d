"""`dist-transformer submit` as a person calls it, with Slurm's commands replaced."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import FakeSlurm, small_snapshot
from fake_slurm import job_line

import dist_transformer
from dist_transformer.cli import submit as submit_module
from dist_transformer.cli.pipeline import submit_pipeline
from dist_transformer.cli.submit import submit_run
from dist_transformer.cluster import checks
from dist_transformer.cluster import submit as cluster_submit
from dist_transformer.cluster.checks import memory_problems
from dist_transformer.cluster.submit import read_job_ids, read_stages
from dist_transformer.config.loading import load_config, with_absolute_paths
from dist_transformer.data.sources.first_pairs import first_pairs_problems
from dist_transformer.errors import ConfigError, UserError
from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir


@pytest.fixture(autouse=True)
def quick_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_submit, "take_snapshot", small_snapshot)


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
    fake_slurm.set_jobs(job_line("9", "RUNNING") + "\n")
    submit_run(config, [], stages=("prepare", "train", "evaluate"), after=("9",))
    first, _, _, log, *_ = capsys.readouterr().out.splitlines()
    assert first == "submitted job 4711 (prepare), job 4712 (train), job 4713 (evaluate), each after the one before"
    assert log.endswith("/slurm/job-4712.log")
    assert "--dependency=afterok:9" in fake_slurm.calls[0]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (None, "job 9 is shown neither by squeue nor by sacct (forgotten, hidden from you, or no answer of sacct)"),
        ("FAILED", "job 9 is FAILED"),
        ("COMPLETED", None),
        ("PENDING", None),
    ],
)
def test_a_job_to_wait_for_that_slurm_does_not_know_or_that_has_failed_is_refused(
    config: Path, fake_slurm: FakeSlurm, state: str | None, why: str | None
) -> None:
    """Slurm starts a job at once that is to wait for one that it does not know."""
    fake_slurm.set_jobs(job_line("9", state) + "\n" if state else "")
    pipeline = config.with_name("pipeline.yaml")
    pipeline.write_text(f"root: {config.parent}/root\nnodes: {{one: {{kind: train, config: {config}}}}}\n")
    for start in (partial(submit_run, config, []), partial(submit_pipeline, pipeline, [])):
        if why is None:
            start(after=("9",), dry_run=False)
        else:
            with pytest.raises(ConfigError) as caught:
                start(after=("9",), dry_run=False)
            advice = "expected one that waits, runs or has ended well: leave out what has"
            assert caught.value.problems == [f"after: {why}: {advice}"]
        start(after=("9",), dry_run=True)
    assert len(fake_slurm.calls) == (2 if why is None else 0)


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
    monkeypatch.setattr(checks, "memory_problems", lambda given: [f"{given.slurm.gpu_memory_gb} GB are too few"])
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
        (["a"] * 2001, [*[""] * 2000, "x " * 2001], [], "empty 2000, too_long 1"),
        (["a"] * 100_001, [*[""] * 100_000, "gut"], [], "empty 100000"),
    ],
)
def test_filters_that_leave_nothing_of_the_first_pairs_are_told_before_the_job_waits(
    tmp_path: Path, source: list[str], target: list[str], overrides: list[str], counts: str
) -> None:
    [problem] = _first_pairs(tmp_path, source, target, *overrides)
    count = min(len(source), 100_000)
    assert problem.startswith(f"data.filters: all of the first {count} pairs of ")
    assert f"would be dropped ({counts}); look at the text" in problem


def test_filters_that_leave_a_pair_are_none_of_submits_business(tmp_path: Path) -> None:
    assert _first_pairs(tmp_path, GOOD, ["", *GOOD[1:]]) == []
    assert _first_pairs(tmp_path, ["bad"] * 5000 + GOOD, [""] * 5000 + GOOD) == []
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
