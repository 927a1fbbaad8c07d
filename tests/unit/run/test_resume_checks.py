"""A run folder that has trained already is only gone on with where that can succeed."""

import json
import os
import time
from pathlib import Path

import pytest
from cluster_helpers import FakeSlurm, config_of, small_snapshot
from fake_slurm import job_line
from prepare_helpers import TEXT, mixture_of, write_text
from prepare_helpers import config_of as corpus_config

from dist_transformer.cli.submit import submit_run
from dist_transformer.cluster import submit as cluster_submit
from dist_transformer.cluster.checks import busy_problems, start_problems, submission_problems
from dist_transformer.cluster.submit import plan_submission
from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import Config, ModelConfig
from dist_transformer.data.prepare.preparation import prepare, prepared_folder, refuse_other_corpus
from dist_transformer.data.prepare.progress import prepare_for_training
from dist_transformer.errors import CheckpointError, ConfigError, DataError, UserError
from dist_transformer.files import write_json
from dist_transformer.processes.stop_request import StopRequest
from dist_transformer.run.folder import RunDir
from dist_transformer.run.lock import BEAT_SECONDS, STALE_BEATS, RunLock
from dist_transformer.run.resume_checks import MODEL_FREE, recipe_of_checkpoint, recipe_settings
from dist_transformer.run.status import look_at
from dist_transformer.training.checkpoint.checkpoints import Checkpoint
from dist_transformer.training.run_data import RunData, _refuse_changes


@pytest.fixture(autouse=True)
def quick_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_submit, "take_snapshot", small_snapshot)


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(
        f"run: {{name: run, root: {tmp_path}}}\ndata: {{train: {{demo: train}}}}\n"
        "model: {preset: tiny, d_model: 128}\ntokenizer: {vocabulary_size: 500}\n"
        "schedule: {warmup_steps: 4}\ntraining: {max_steps: 60}\n"
    )
    return path


def _save(run_dir: RunDir, config: Config, step: int = 60, **found: object) -> None:
    """A checkpoint as training leaves it, as far as its state is read here."""
    digests = {"prepared corpus": "0123", "source_vocabulary": 500}
    recipe = json.loads(json.dumps({**recipe_settings(config), **digests, **found}))
    write_json(run_dir.checkpoints / f"step_{step:08d}" / "state.json", {"step": step, "recipe": recipe})


def test_another_model_than_that_of_the_checkpoint_is_refused_before_its_configuration_is_replaced(
    yaml: Path, run_dir: RunDir, fake_slurm: FakeSlurm
) -> None:
    submit_run(yaml, [])
    before = run_dir.config.read_text()
    _save(run_dir, load_config(yaml, ["model.d_model=64"]), step=20)  # an older one does not count
    _save(run_dir, load_config(yaml))
    for run in (yaml, run_dir.path):
        with pytest.raises(ConfigError) as caught:
            submit_run(run, ["model.d_model=64"])
        assert str(caught.value) == (
            f"cannot submit:\n  run folder {run_dir.path}: its checkpoint step_00000060 cannot be resumed: "
            "model.d_model: 128 -> 64; put it back, or choose another run.name"
        )
    assert run_dir.config.read_text() == before
    assert len(fake_slurm.calls) == 1
    submit_run(yaml, ["model.dropout=0.3", "optimizer.learning_rate=0.1"])
    assert len(fake_slurm.calls) == 2


YOUNGER = {"norm_type": "rms", "final_norm": True, "activation": "gelu", "positions": "rotary", "output_bias": True}
"""Settings that older checkpoints do not name, with another value than what they then were."""


@pytest.mark.parametrize("settings", [[], ["model.positions=learned", "model.max_positions=512"]], ids=str)
def test_a_checkpoint_from_before_a_setting_goes_on_where_the_setting_is_what_it_then_was(
    yaml: Path, run_dir: RunDir, settings: list[str]
) -> None:
    config = load_config(yaml, settings)
    _save(run_dir, config)
    state = run_dir.checkpoints / "step_00000060" / "state.json"
    recipe = json.loads(state.read_text())["recipe"]
    assert {f"model.{name}" for name in YOUNGER} < set(recipe)
    write_json(state, {"recipe": {key: recipe[key] for key in recipe if key.removeprefix("model.") not in YOUNGER}})
    assert submission_problems(config, run_dir, 1) == []
    for name, value in YOUNGER.items():
        changed = config.model_copy(update={"model": config.model.model_copy(update={name: value})})
        [problem] = submission_problems(changed, run_dir, 1)
        assert f"cannot be resumed: model.{name}: {getattr(config.model, name)} -> {value}; put it back" in problem


FIRST = {
    "d_model", "d_ff", "num_heads", "num_encoder_layers", "num_decoder_layers", "norm", "shared_embeddings", "tied_output"
}  # fmt: skip
"""Settings of the model that every checkpoint of this format names."""
NOT_GIVEN_THEN = {"key_size", "value_size", "max_positions", "plugin"}
"""Younger ones without which the model is what it then was: not named and None are the same."""


def test_every_setting_of_the_model_is_in_all_checkpoints_or_filled_or_may_change(yaml: Path) -> None:
    """A setting that is added must be put into one of these, or checkpoints from before it could not be gone on with."""
    filled = {key.removeprefix("model.") for key in recipe_of_checkpoint({})}
    assert {*ModelConfig.model_fields} == FIRST | NOT_GIVEN_THEN | filled | MODEL_FREE
    model = load_config(yaml).model
    assert all(getattr(model, name) is None for name in NOT_GIVEN_THEN)
    assert {f"model.{name}": getattr(model, name) for name in filled} == recipe_of_checkpoint({})


@pytest.mark.parametrize("named", [True, False], ids=["named in the checkpoint", "younger than the checkpoint"])
def test_how_the_first_weights_were_drawn_may_change(yaml: Path, run_dir: RunDir, named: bool) -> None:
    _save(run_dir, load_config(yaml), **({"model.attention_gain": 1.0} if named else {}))
    assert submission_problems(load_config(yaml, ["model.attention_gain=0.7071"]), run_dir, 1) == []


def test_what_updates_the_matrices_may_not_change_and_was_adam_before(yaml: Path, run_dir: RunDir) -> None:
    muon = ["optimizer.matrices=muon"]
    _save(run_dir, load_config(yaml))
    assert submission_problems(load_config(yaml), run_dir, 1) == []
    assert any("optimizer.matrices" in problem for problem in submission_problems(load_config(yaml, muon), run_dir, 1))
    _save(run_dir, load_config(yaml, muon))
    assert submission_problems(load_config(yaml, muon), run_dir, 1) == []
    assert any("optimizer.matrices" in problem for problem in submission_problems(load_config(yaml), run_dir, 1))


def test_modifiers_may_not_change_but_checkpoints_from_before_them_had_none(yaml: Path, run_dir: RunDir) -> None:
    modified = ["data.on_the_fly=true", "data.modifiers={typos: 0.1, noise: 0}"]
    _save(run_dir, load_config(yaml))
    assert submission_problems(load_config(yaml), run_dir, 1) == []
    [problem] = submission_problems(load_config(yaml, modified), run_dir, 1)
    assert "data.modifiers: None -> {'typos': 0.1}; put it back" in problem
    _save(run_dir, load_config(yaml, modified))
    assert submission_problems(load_config(yaml, [*modified[:1], "data.modifiers.typos=0.1"]), run_dir, 1) == []


def test_all_changes_are_named_and_other_lanes_have_a_remedy_of_their_own(yaml: Path, run_dir: RunDir) -> None:
    _save(run_dir, load_config(yaml, ["data.lanes=4"]))
    [problem] = submission_problems(load_config(yaml, ["run.seed=9"]), run_dir, 1)
    assert "data.lanes: 4 -> 8, run.seed: 1 -> 9; put them back, or choose" in problem
    [problem] = submission_problems(load_config(yaml), run_dir, 1)
    assert problem.endswith("put it back, set data.reslice_from=4, or choose another run.name")
    assert submission_problems(load_config(yaml, ["data.reslice_from=4"]), run_dir, 1) == []


def test_a_token_budget_that_was_found_is_no_change(yaml: Path, run_dir: RunDir) -> None:
    config = load_config(yaml, ["data.max_tokens=auto"])
    _save(run_dir, config, **{"data.max_tokens": 4096})
    assert submission_problems(config, run_dir, 1) == []


def _data_of(config: Config) -> RunData:
    return RunData(config, prepared_folder(config), prepare(config))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The checkpoint, as far as it is read here, of a run beside the text of `corpus_config`."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder)
    data = _data_of(corpus_config(folder))
    for side in ("en", "de"):
        (folder / f"seen.{side}").write_bytes((folder / f"train.{side}").read_bytes())
    (folder / "mine.model").write_bytes((data.folder / data.manifest.tokenizer.source).read_bytes())
    path = RunDir(folder / "runs" / data.config.run.name).checkpoints / "step_00000060"
    state = {"step": 60, "recipe": data.recipe(), "settings": {"data": {"prepared": str(data.folder)}}}
    write_json(path / "state.json", state)
    return Checkpoint(path, json.loads((path / "state.json").read_text()))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"data": {"test": {"source": "validation.en", "target": "validation.de"}}},
        {"data": {"more_validation": {"seen": {"source": "seen.en", "target": "seen.de"}}}},
        {"data": {"loader_workers": 2, "audit": True}},
        {"data": {"filters": {"rules": {"held_out": True}}}},
        {"training": {"max_steps": 7, "log_every_steps": 3}, "validation": {"metric": "bleu"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_corpus_with_which_training_goes_on_is_no_problem_of_the_checkpoint(
    trained: Checkpoint, settings: dict[str, dict[str, object]], is_named: bool
) -> None:
    folder, run_dir = trained.path.parents[3], RunDir(trained.path.parents[1])
    [prepared] = (run_dir.path.parent / "prepared").glob(f"{'[0-9a-f]' * 16}")
    named = {"data": {**settings.get("data", {}), "prepared": str(prepared)}} if is_named else {}
    config = corpus_config(folder, **(settings | named))
    _refuse_changes(trained, _data_of(config).recipe(), set())
    assert submission_problems(config, run_dir, 1) == []
    assert [*start_problems(config, run_dir)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"data": {"filters": {"max_tokens": 77}}}, "filters.max_tokens: 256 in the folder, 77 now"),
        ({"data": {"filters": {"rules": {"letters": 0.1}}}}, "filters.rules.letters: None in the folder, 0.1 now"),
        ({"data": {"normalization": "NFKC"}}, "normalization: 'none' in the folder, 'NFKC' now"),
        ({"data": {"row_group_rows": 64}}, "row_group_rows: 32 in the folder, 64 now"),
        ({"data": {"on_the_fly": True}}, "on_the_fly: False in the folder, True now"),
        ({"data": {"source_language": "fr"}}, "source_language: 'en' in the folder, 'fr' now"),
        ({"data": mixture_of(one={"source": "train.en", "target": "train.de"})}, "training_order: "),
        ({"data": {"train": {**TEXT, "tags": ["<a>"]}}}, "data.train.tags: None in the folder, ['<a>'] now"),
        (
            {"data": {"train": {**TEXT, "filters": {"max_tokens": 77}}}},
            "data.train.filters.max_tokens: None in the folder, 77 n",
        ),
        (
            {"data": {"train": {"source": "seen.en", "target": "seen.de"}}},
            "(train.de, train.en); 2 added (seen.de, seen.en)",
        ),
        ({"data": {"validation": None}}, "validation.files: 2 removed (validation.de, validation.en)"),
        ({"tokenizer": {"vocabulary_size": 248}}, "tokenizer.vocabulary_size: 240 in the folder, 248 now"),
        ({"tokenizer": {"source_model": "mine.model"}}, "tokenizer.vocabulary_size: 240 in the folder, None now"),
        ({"run": {"seed": 4}}, "seed: 3 in the folder, 4 now"),
    ],
    ids=str,
)
def test_a_corpus_with_which_training_could_not_go_on_is_refused_before_it_is_prepared(
    trained: Checkpoint, setting: dict[str, dict[str, object]], said: str, tmp_path: Path
) -> None:
    folder, run_dir = trained.path.parents[3], RunDir(trained.path.parents[1])
    if (model := setting.get("tokenizer", {}).get("source_model")) is not None:
        setting = {"tokenizer": {"source_model": str(folder / str(model)), "target_model": str(folder / str(model))}}
    config = corpus_config(folder, **setting)
    before = sorted(folder.rglob("*"))
    with pytest.raises(DataError) as early:
        prepare_for_training(config, StopRequest())
    assert "this folder was prepared with other settings" in str(early.value)
    assert said in str(early.value)
    assert sorted(folder.rglob("*")) == before
    assert str(early.value) in [*start_problems(config, run_dir)]
    assert str(early.value) in submission_problems(config, run_dir, 1)
    assert submission_problems(config, run_dir, 1, is_anew=True) == []
    elsewhere = config.model_copy(update={"data": config.data.model_copy(update={"prepared": str(tmp_path / "other")})})
    refuse_other_corpus(elsewhere)
    with pytest.raises(CheckpointError, match="these have changed"):
        _refuse_changes(trained, _data_of(elsewhere).recipe(), set())


@pytest.mark.parametrize("root", ["gone", "http://[::1]:1"])
def test_of_text_that_is_gone_or_remote_only_the_settings_are_compared(trained: Checkpoint, root: str) -> None:
    folder = trained.path.parents[3]
    refuse_other_corpus(corpus_config(folder, data={"root": root, "validation": None}))
    with pytest.raises(DataError, match="row_group_rows: 32 in the folder, 64 now"):
        refuse_other_corpus(corpus_config(folder, data={"root": root, "row_group_rows": 64}))


@pytest.mark.parametrize("text", ["", "{", "{}", "[]"])
def test_a_checkpoint_whose_state_cannot_be_read_is_left_to_training(yaml: Path, run_dir: RunDir, text: str) -> None:
    _save(run_dir, load_config(yaml))
    (run_dir.checkpoints / "step_00000060" / "state.json").write_text(text)
    assert submission_problems(load_config(yaml, ["run.seed=9"]), run_dir, 1) == []


def test_a_finished_run_is_not_trained_again_unless_it_is_given_more_steps(
    yaml: Path, run_dir: RunDir, fake_slurm: FakeSlurm
) -> None:
    submit_run(yaml, ["data.test={demo: test}"])
    run_dir.model.mkdir()
    write_json(run_dir.state, {"state": "finished", "step": 60})
    finished = f"{run_dir.path}: is finished at step 60 of 60; give a larger training.max_steps to continue"
    with pytest.raises(ConfigError) as caught:
        submit_run(run_dir.path, [])
    assert (caught.value.exit_code, caught.value.problems) == (2, [finished])
    submit_run(run_dir.path, ["training.max_steps=61"])
    submit_run(run_dir.path, [], stages=("evaluate",))
    write_json(run_dir.state, {"state": "stopped", "step": 60})
    submit_run(run_dir.path, ["training.max_steps=60"])
    assert len(fake_slurm.calls) == 4


def test_a_run_that_has_nothing_is_neither_averaged_nor_evaluated(run_dir: RunDir) -> None:
    config = config_of(data={"test": {"demo": "test"}})

    def plan(*, after: tuple[str, ...] = ()) -> None:
        plan_submission(config, run_dir, stages=("average", "evaluate"), after=after, dry_run=True)

    with pytest.raises(
        ConfigError, match="has neither a checkpoint nor model/, so --stages average,evaluate would find"
    ):
        plan()
    plan(after=("7",))
    _save(run_dir, config)
    plan()


def test_a_network_of_a_plug_in_is_averaged_and_not_evaluated_by_a_job(run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text("def build(): ...\n")
    config = config_of(data={"test": {"demo": "test"}})
    model = config.model.model_copy(update={"plugin": f"{tmp_path}/network.py:build"})
    config = config.model_copy(update={"model": model})
    plan_submission(config, run_dir, stages=("train", "average"), dry_run=True)
    with pytest.raises(ConfigError, match=r"model.plugin: .* evaluate --plugin") as caught:
        plan_submission(config, run_dir, stages=("train", "evaluate"), dry_run=True)
    assert len(caught.value.problems) == 1


# -------------------------------------------------------------------------------------------------------------- busy


def test_a_job_that_was_started_by_hand_works_on_the_run_folder_too(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    run_dir.slurm.mkdir(parents=True)
    run_dir.attempts.write_text('{"event": "began", "time": 1795307143, "job": "99", "attempt": 0}\n')
    fake_slurm.set_jobs(job_line("99", "RUNNING") + "\n")
    [problem] = busy_problems(run_dir)
    assert problem == (
        f"run folder {run_dir.path}: job 99 already works on it (RUNNING); wait for it, end it with "
        f"`dist-transformer stop {run_dir.path}`, or choose another run.name"
    )
    fake_slurm.set_jobs(job_line("99", "COMPLETED") + "\n")
    assert busy_problems(run_dir) == []
    fake_slurm.set_jobs(job_line("99", "RUNNING", comment=f"dist-transformer:{run_dir.path.parent}") + "\n")
    assert busy_problems(run_dir) == []  # another cluster's job, with the same number


def test_a_process_without_a_job_works_on_the_run_folder_while_its_heart_beats(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run_dir.path.mkdir()
    lock = RunLock(run_dir)
    lock.acquire()
    try:
        [problem] = busy_problems(run_dir)
        assert f"process {os.getpid()} on " in problem
        assert "already works on it, without a job; wait for it, end it with `dist-transformer stop " in problem
    finally:
        lock.release()
    assert busy_problems(run_dir) == []
    write_json(run_dir.owner, {"host": "n1", "pid": 7, "job": None})
    for seconds in (-STALE_BEATS * BEAT_SECONDS - 1, 3600):
        os.utime(run_dir.owner, (0, time.time() + seconds))
        assert busy_problems(run_dir) == []
        assert not look_at(run_dir).is_alive(time.time() - 3600)


def test_a_process_in_a_job_works_on_the_run_folder_unless_slurm_says_that_its_job_is_over(
    run_dir: RunDir, fake_slurm: FakeSlurm
) -> None:
    """`train` in an interactive job, which no file of the run names, or in somebody else's, which squeue may hide."""
    write_json(run_dir.owner, {"host": "n1", "pid": 7, "job": "55"})
    for known, said in (
        ("", "process 7 on n1 already works on it, in job 55"),
        ("RUNNING", "job 55 already works on it"),
    ):
        fake_slurm.set_jobs(job_line("55", known) + "\n" if known else "")
        [problem] = busy_problems(run_dir)
        assert said in problem
    fake_slurm.set_jobs(job_line("55", "CANCELLED") + "\n")
    assert busy_problems(run_dir) == []
    fake_slurm.set_jobs("")
    fake_slurm.program("sacct", "echo '55|55|COMPLETED|1795307143|1|n1|main|1795307143|0:0|0|'")  # of another cluster
    [problem] = busy_problems(run_dir)
    assert "process 7 on n1 already works on it, in job 55" in problem


def test_a_task_of_an_array_by_hand_does_not_work_on_the_runs_of_others(run_dir: RunDir, fake_slurm: FakeSlurm) -> None:
    """The number of its last task is that of the whole array."""
    write_json(run_dir.owner, {"host": "n1", "pid": 7, "job": "2"})
    os.utime(run_dir.owner, (0, 0))
    fake_slurm.set_jobs(f"{job_line('2_3', 'RUNNING')}\n{job_line('2_4', 'CANCELLED')}\n")
    assert busy_problems(run_dir) == []


@pytest.mark.parametrize("ahead", [-300.0, 300.0])
def test_a_heartbeat_is_timed_by_the_clock_of_the_file_system(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    of_server = time.time
    monkeypatch.setattr(time, "time", lambda: of_server() - ahead)
    write_json(run_dir.owner, {"host": "n1", "pid": 7, "job": None})
    assert len(busy_problems(run_dir)) == 1
    assert look_at(run_dir).is_alive(time.time())
    old = of_server() - 200
    os.utime(run_dir.owner, (old, old))
    assert busy_problems(run_dir) == []
    assert not look_at(run_dir).is_alive(time.time())


def test_a_profile_for_a_run_folder_is_refused_as_it_would_fill_nothing(
    yaml: Path, run_dir: RunDir, fake_slurm: FakeSlurm
) -> None:
    submit_run(yaml, ["slurm.cluster=lab", "data.lanes=64", "slurm.nodes=1"])
    with pytest.raises(UserError) as caught:
        submit_run(run_dir.path, ["slurm.cluster=infiniband"])
    assert str(caught.value) == (
        "slurm.cluster: the settings of a run folder are complete, so a profile fills none of them; give the YAML file, "
        "or the settings themselves: slurm.sbatch.partition=..."
    )
    assert len(fake_slurm.calls) == 1
