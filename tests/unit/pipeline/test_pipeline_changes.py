"""Nodes whose settings or text change: set aside, taken back, or refused."""

import errno
import gzip
import os
import shutil
from pathlib import Path

import pytest
from pipeline_folder import CONFIG, due, make, make_all, pipeline_in
from typer.testing import CliRunner, Result

from dist_transformer.cli import pipeline as cli
from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.errors import EXIT_DONE, ConfigError, UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.pipeline import filtering
from dist_transformer.pipeline import run as run_module
from dist_transformer.pipeline import state as module
from dist_transformer.pipeline.filtering import filter_files
from dist_transformer.pipeline.results import status_rows
from dist_transformer.pipeline.run import begin, set_aside
from dist_transformer.pipeline.schema import RECORD, read_pipeline
from dist_transformer.pipeline.state import states_of
from dist_transformer.processes.children import forwarding_signals
from dist_transformer.run.folder import RunDir


def test_what_was_set_aside_is_taken_back_when_its_change_is_undone(folder):
    pipeline = pipeline_in(folder)
    make_all(pipeline)
    made = {name: (pipeline.folder(name) / RECORD).read_bytes() for name in pipeline.nodes}
    (folder / "train.en").write_text("1\n3\n")
    states = states_of(pipeline)
    assert set_aside(pipeline, states) is states
    begin(pipeline, "teacher", states["teacher"])  # and fails
    (folder / "train.en").write_text("1\n2\n")
    assert {state.state for state in set_aside(pipeline, states_of(pipeline)).values()} == {"done"}
    assert due(pipeline) == {}
    assert {name: (pipeline.folder(name) / RECORD).read_bytes() for name in pipeline.nodes} == made
    assert {path.name for path in pipeline.root.glob("*.*")} == {"teacher.2"}


def test_what_was_begun_is_taken_back_too_and_resumed_when_its_change_is_undone(folder):
    pipeline, other = pipeline_in(folder), pipeline_in(folder, "set.training.max_steps=6")
    make(pipeline, "teacher", states_of(pipeline)["teacher"], is_whole=False)
    for step in (1, 2):  # the newest of those is resumed
        states = set_aside(other, states_of(other))
        begin(other, "teacher", states["teacher"])
        states = set_aside(pipeline, states_of(pipeline))
        assert (states["teacher"].state, states["teacher"].restarts) == ("begun", False)
        assert read_json(pipeline.folder("teacher") / "run.json")["step"] == 5, step
    assert {path.name for path in pipeline.root.glob("*.*")} == {"teacher.2"}
    make(pipeline, "teacher", states["teacher"])
    make(pipeline, "forward", states_of(pipeline)["forward"], is_whole=False)
    changed = pipeline_in(folder, "nodes.forward.beam=7")
    set_aside(changed, states_of(changed))
    record = pipeline.root / "forward.1" / RECORD
    write_json(record, {**read_json(record), "begun": 1.0})  # before the teacher was done
    assert set_aside(pipeline, states_of(pipeline))["forward"].state == "new"


def run_in(folder: Path, *overrides: str) -> Result:
    return CliRunner().invoke(cli.app, ["run", str(folder / "pipeline.yaml"), *overrides])


@pytest.mark.parametrize("change", ["base.yaml", "train.en"])
def test_a_node_whose_settings_or_text_changed_since_the_pipeline_began_does_not_begin(change, folder, monkeypatch):
    pipeline = pipeline_in(folder)
    states = states_of(pipeline)
    monkeypatch.setattr(module, "file_sha256", lambda path: pytest.fail(f"{path} is hashed again"))
    module.check_unchanged(pipeline, "teacher", states)
    monkeypatch.undo()
    (folder / change).write_text({"base.yaml": CONFIG.replace("5", "7"), "train.en": "1\n3\n"}[change])
    told = "settings" if change == "base.yaml" else change
    with pytest.raises(UserError, match=f"node teacher: changed since the pipeline began: {told}; start the same"):
        module.check_unchanged(pipeline, "teacher", states)
    module.check_unchanged(pipeline, "other", states)  # which does not read it


def test_a_node_whose_text_changes_while_it_runs_is_not_done(folder, monkeypatch):
    """Its result is of the one text or the other, so an undone change does not bring it back."""
    (folder / "pipeline.yaml").write_text(
        f"root: {folder}/root\ndata_root: {folder}\nnodes:\n"
        "  kept: {kind: filter, source: mono, target: mono, scores: scores, drop: 0.5}\n"
    )
    pipeline = pipeline_in(folder)

    def changing(*given: object) -> None:
        filter_files(*given)
        (folder / "mono").write_text("2\n1\n")
        os.utime(folder / "mono", (1000, 1000))  # before the result was written, not after

    with monkeypatch.context() as patch:
        patch.setattr(filtering, "filter_files", changing)
        told = run_in(folder)
    assert isinstance(told.exception, UserError)
    assert "node kept: mono changed while it ran; start the same command again" in str(told.exception)
    assert due(pipeline) == {"kept": "changed: mono"}
    (folder / "mono").write_text("1\n2\n")
    assert due(pipeline) == {"kept": "changed: files or settings, while it ran"}
    assert run_in(folder).exit_code == 0
    assert due(pipeline) == {}
    (folder / "mono").write_text("4\n5\n")  # after it was done
    assert due(pipeline) == {"kept": "changed: mono"}


def test_a_pipeline_ends_before_a_node_whose_text_was_edited_while_another_one_ran(folder, monkeypatch):
    kept = "{{kind: filter, source: {0}, target: {0}, scores: scores}}"
    nodes = f"  first: {kept.format('mono')}\n  second: {kept.format('train.en')}\n"
    (folder / "pipeline.yaml").write_text(f"root: {folder}/root\ndata_root: {folder}\nnodes:\n{nodes}")

    def editing(*given: object) -> None:
        filter_files(*given)
        (folder / "train.en").write_text("1\n3\n")

    with monkeypatch.context() as patch:
        patch.setattr(filtering, "filter_files", editing)
        told = run_in(folder)
    assert "node second: changed since the pipeline began: train.en; start the same command again" in str(
        told.exception
    )
    assert [path.name for path in (folder / "root").iterdir() if path.is_dir()] == ["first"]
    assert run_in(folder).exit_code == 0


def test_text_that_a_later_node_cannot_read_is_told_before_anything_runs(folder):
    """The text of a translation, the scores of a filter, and a test set with a line less on one side."""
    scored = "nodes.bleu={kind: evaluate, model: {node: teacher}, source: test.en, reference: test.de}"
    (folder / "test.en").write_text("1\n2\n")
    (folder / "test.de").write_text("1\n")
    (folder / "scores").write_text("1\n2\n3\n")
    (folder / "other.gz").write_bytes(gzip.compress(b"1\n2\n"))
    (folder / "bad").write_bytes(b"1\n\xff\n")
    inputs = ("nodes.forward.input=bad", "nodes.other.input=other.gz")
    told = run_in(folder, scored, *inputs)
    assert isinstance(told.exception, ConfigError)
    expected = ("bad, line 2: not valid UTF-8", "other.gz: is compressed; unpack it (zcat", "scores has 3 lines: expected",
                "test.de")  # fmt: skip
    assert len(told.exception.problems) == 4
    assert all(any(text in problem for problem in told.exception.problems) for text in expected), told.exception
    assert not list((folder / "root").glob("*/"))
    with pytest.raises(ConfigError, match=r"other\.gz: is compressed"):
        cli.submit_pipeline(folder / "pipeline.yaml", [scored, *inputs], (), dry_run=True)


def test_a_node_that_failed_is_shown_with_its_exit_code_until_it_begins_again(folder):
    pipeline = pipeline_in(folder, "nodes.kept.target=mono")
    (folder / "scores").write_text("1\nx\n")
    begin(pipeline, "kept", states_of(pipeline)["kept"])
    with forwarding_signals() as signals:
        assert run_module.run_node(pipeline, "kept", signals) == 2

    def shown() -> str:
        return next(row[2] for row in status_rows(pipeline, states_of(pipeline), {}) if row[0] == "kept")

    assert shown() == "failed (exit code 2)"
    begin(pipeline, "kept", states_of(pipeline)["kept"])
    assert shown() == "stopped"


@pytest.mark.parametrize("damage", ["edited", "gone", "older"])
def test_what_was_set_aside_stays_there_if_it_is_not_whole_or_older_than_what_it_is_made_of(damage, folder):
    pipeline = pipeline_in(folder)
    make_all(pipeline)
    set_aside(pipeline_in(folder, "nodes.forward.beam=7"), states_of(pipeline_in(folder, "nodes.forward.beam=7")))
    aside = pipeline.root / "forward.1"
    if damage == "older":
        write_json(aside / RECORD, {**read_json(aside / RECORD), "done": 1.0})
    elif damage == "edited":
        (aside / "text").write_text("edited")
    else:
        (aside / "text").unlink()
    set_aside(pipeline, states_of(pipeline))
    assert due(pipeline) == {"forward": "", "kept": ""}
    assert aside.is_dir()
    assert not pipeline.folder("forward").exists()


def test_a_slash_behind_the_folder_of_the_text_changes_nothing(folder, monkeypatch):
    """A version before named files by their whole paths then; what it has made stays done too."""
    slash, plain = f"data_root={folder}/", pipeline_in(folder)
    assert [*states_of(pipeline_in(folder, slash))["teacher"].now["files"]] == ["train.en", "train.de"]
    make_all(plain)
    assert due(pipeline_in(folder, slash)) == {}
    monkeypatch.chdir(folder.parent)
    assert (
        due(pipeline_in(folder, f"data_root={folder.name}/"))
        == due(pipeline_in(folder, f"data_root=./{folder.name}"))
        == {}
    )
    text = f"set.data.train={{source: {folder}/mono, target: {folder}/mono}}"
    assert [*module.what_goes_in(pipeline_in(folder, "data_root=/", text), "teacher")[1]] == [f"{folder}/mono"[1:]]


@pytest.mark.parametrize("place", ["text/", "text//", "root/text/", "root/text//"])
def test_a_node_whose_files_were_named_by_their_whole_paths_stays_done(place, folder, monkeypatch):
    """As by a version before where a slash is behind the folder of the text, which may be below the root."""
    (folder / place).mkdir(parents=True)
    for name in ("train.en", "train.de", "mono", "scores"):
        (folder / place / name).write_text("1\n2\n")
    words = (f"data_root={folder}/{place}", f"nodes.other.model={folder}/made",
             "set.data.train.filters={scores: {scores: -3}}")  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(module, "located", lambda root, _: f"{root}/")
        make_all(pipeline := pipeline_in(folder, *words))
    record = read_json(pipeline.folder("teacher") / RECORD)
    assert "scores (scores)" not in record["files"]
    assert due(pipeline) == {}
    (folder / place / "train.en").write_text("2\n1\n")
    assert due(pipeline)["teacher"].startswith("changed: /")


def test_a_model_that_is_trained_further_by_hand_is_done_as_long_as_it_is_as_it_was(folder):
    pipeline = pipeline_in(folder)
    make_all(pipeline)
    run = RunDir(pipeline.folder("teacher"))
    write_json(run.state, {"state": "stopped", "step": 7})
    assert due(pipeline) == {}
    (run.model / "model.safetensors").write_text("of step 7")
    assert due(pipeline)["teacher"] == "its results are not as it made them"


def test_an_average_of_a_run_from_outside_is_done_whatever_becomes_of_checkpoints_that_it_may_not_read(folder):
    run = RunDir(folder / "run")
    for place in (run.model / "model.safetensors", *(run.checkpoints / f"step_{n}" / "manifest.json" for n in (4, 5))):
        place.parent.mkdir(parents=True)
        place.write_text("5")
    pipeline = pipeline_in(folder, "nodes.mean={kind: average, run: run, last: 1}")
    states = states_of(pipeline)
    shutil.copytree(run.checkpoints / "step_5", run.checkpoints / "step_6")
    module.check_unchanged(pipeline, "mean", states)
    make_all(pipeline)
    shutil.rmtree(run.checkpoints / "step_4")
    assert due(pipeline) == {}
    (run.model / "model.safetensors").write_text("6")
    assert due(pipeline) == {"mean": "changed: run/model/model.safetensors"}


def test_weights_to_start_with_that_are_not_there_are_told_before_anything_runs(folder):
    with pytest.raises(ConfigError) as error:
        states_of(pipeline_in(folder, "nodes.teacher.set.training.init_from=none"))
    [problem] = error.value.problems
    assert "teacher.set.training.init_from" in problem
    assert "training.init_from: none is no folder; expected a run folder" in problem
    assert states_of(pipeline_in(folder, f"nodes.teacher.set.training.init_from={folder}/made"))


@pytest.mark.parametrize("place", ["root/forward/text", "{folder}/root/forward/text", "other/../root/forward/text"])
def test_a_path_into_the_folder_of_a_node_is_a_reference_to_it(place, folder):
    """In a configuration, which other nodes may share, it says nothing: what another node makes changes no node that runs."""
    place = place.format(folder=folder)
    (folder / "base2.yaml").write_text(CONFIG.replace("train.de", "root/forward/text"))
    words = [f"nodes.kept.target={place}", "nodes.by_config={kind: train, config: base2.yaml}"]
    words += [f"nodes.student={{kind: train, config: base.yaml, set: {{data: {{train: {{target: {place}}}}}}}}}"]
    pipeline = pipeline_in(folder, *words)
    assert (pipeline.nodes["kept"].reads, pipeline.nodes["student"].reads) == (("forward",), ("forward",))
    assert [*pipeline.nodes].index("forward") < min(map([*pipeline.nodes].index, ("kept", "student")))
    (folder / "copy.yaml").write_text(cli._as_submitted(pipeline))
    assert {name: node.reads for name, node in read_pipeline(folder / "copy.yaml").nodes.items()} == {
        name: node.reads for name, node in pipeline.nodes.items()
    }
    states = states_of(pipeline)
    make_all(pipeline)
    assert due(pipeline) == {}
    for name in pipeline.nodes:
        module.check_unchanged(pipeline, name, states)
    changed = pipeline_in(folder, *words, "nodes.forward.beam=7")
    assert due(changed) == {"forward": "changed: settings", "kept": "changed: forward", "student": "changed: forward"}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_node_from_before_typed_paths_were_references_stays_done_or_resumes_until_the_other_node_changes(
    is_whole, folder
):
    (folder / "quality").write_text("1\n0\n")  # which versions before did not count either
    text = f"{{source: {folder}/mono, target: {folder}/root/forward/text, filters: {{scores: {{quality: 0.5}}}}}}"
    words = [f"nodes.student={{kind: train, config: base.yaml, set: {{data: {{train: {text}}}}}}}"]
    pipeline = pipeline_in(folder, *words)
    make_all(pipeline)
    path = pipeline.folder("student") / RECORD
    record = read_json(path)
    assert [*record["made_of"]["nodes"]] == ["forward"]
    record["made_of"] |= {"nodes": {}, "files": {"mono": record["made_of"]["files"]["mono"]}}
    write_json(path, record | {"key": module.json_digest(record["made_of"])})
    if not is_whole:
        write_json(path, {key: each for key, each in read_json(path).items() if key not in ("done", "made")})
        write_json(RunDir(path.parent).state, {"state": "stopped", "step": 3})
    assert (states_of(pipeline)["student"].state, states_of(pipeline)["student"].restarts) == (
        "done" if is_whole else "begun",
        False,
    )
    changed = pipeline_in(folder, *words, "nodes.forward.beam=7")
    assert due(changed)["student"] == "changed: quality (scores), forward"
    make_all(changed)
    assert [*read_json(path)["made_of"]["nodes"]] == ["forward"]
    make_all(pipeline)  # takes nothing back that was made of another text of forward
    assert due(pipeline) == {}
    assert [*read_json(path)["made_of"]["nodes"]] == ["forward"]


@pytest.mark.parametrize("final_model", ["average_last", "average_best"])
def test_a_node_that_a_person_has_trained_with_other_settings_is_not_done(final_model, folder):
    """Settings on which no result depends may be others, as the folders, those that a message about memory or the disk
    recommends, and a number that was found for `auto`. But `keep_best` is the number of checkpoints that are averaged."""
    words = ["set.data={max_tokens: auto, validation: {source: mono, target: mono}}"]
    words += [f"set.checkpoints={{final_model: {final_model}, keep_best: 2}}"]
    pipeline = pipeline_in(folder, *words)
    run = RunDir(pipeline.folder("teacher"))
    free = {"slurm.nodes": 4, "tracking.enabled": False, "training.log_every_steps": 1, "data.max_tokens": 512,
            "training.activation_checkpointing": True, "training.zero_stage": 3, "training.offload": "optimizer",
            "checkpoints.keep_last": 7, "checkpoints.keep_every_steps": 1000}  # fmt: skip
    best, changed = {"checkpoints.keep_best": 1}, {"optimizer.learning_rate": 0.1, "training.max_steps": 9}
    free |= best if final_model == "average_last" else {}
    for values in (free, free | best | changed):
        set_aside(pipeline, states_of(pipeline))
        begin(pipeline, "teacher", states_of(pipeline)["teacher"])
        run.model.mkdir()
        (run.model / "model.safetensors").write_text("weights")
        overrides = [f"{key}={value}" for key, value in values.items()]
        config = load_config(run.path / module.SETTINGS, [*overrides, f"data.prepared={folder}/prepared"])
        run.config.write_text(to_yaml(config))
        write_json(run.state, {"state": "finished", "step": 5})
        if "training.max_steps" in values:
            told = str(run_in(folder, *words).exception)
            expected = {*changed, *(best if final_model == "average_best" else ())}
            assert {*told.removeprefix("node teacher: ").partition(" changed while it ran")[0].split(", ")} == expected
            assert due(pipeline)["teacher"] == "changed: files or settings, while it ran"
        else:
            set_aside(pipeline, {"teacher": states_of(pipeline)["teacher"]})
            assert "teacher" not in due(pipeline)
            (folder / "train.en").write_text("3\n4\n")  # so that it begins anew


@pytest.mark.parametrize("left", [[], [".node.json.7.8.tmp"], [".node.json.7.8.tmp", "lock"]], ids=len)
def test_a_node_that_was_killed_before_its_record_was_written_begins(left, folder):
    pipeline = pipeline_in(folder)
    pipeline.folder("other").mkdir(parents=True)
    for name in left:
        (pipeline.folder("other") / name).touch()
    make_all(pipeline)
    assert due(pipeline) == {}


def test_what_a_kill_has_left_of_a_model_card_changes_no_node(folder):
    make_all(pipeline := pipeline_in(folder))
    for model in (folder / "made", pipeline.folder("teacher") / "model"):
        (model / ".README.md.7.8.tmp").write_text("half a card")
    assert due(pipeline) == {}
    (pipeline.folder("teacher") / "model" / "more.safetensors").write_text("weights")
    assert set(due(pipeline)) == {"teacher", "forward", "kept"}


def test_scores_are_on_the_disk_before_they_have_their_name(folder, monkeypatch):
    """After a power loss an empty file under that name would count as whole."""
    made = "{node: forward}"
    pipeline = pipeline_in(folder, f"nodes.scored={{kind: score, model: made, source: mono, target: {made}}}")
    begin(pipeline, "scored", states_of(pipeline)["scored"])
    scores, flushed = pipeline.folder("scored") / "scores", []

    def fsync(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        if flushed[-1] == ".printed":
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(run_module, "run_program", lambda program, signals, printed: EXIT_DONE)
    with forwarding_signals() as signals:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(OSError, match="Input/output error"):
                run_module.run_node(pipeline, "scored", signals)
        assert ".printed" in flushed
        assert not scores.exists()
        assert run_module.run_node(pipeline, "scored", signals) == EXIT_DONE
    assert scores.exists()
