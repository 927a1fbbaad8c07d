"""Which nodes are done, which resume, which begin anew."""

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from filelock import FileLock
from pipeline_folder import CONFIG, due, make, make_all, pipeline_in
from stuttering_disk import FOR_GOOD, stuttering
from typer.testing import CliRunner

from dist_transformer.cli import pipeline as cli
from dist_transformer.errors import EXIT_REQUEUE, EXIT_USER_ERROR, ConfigError, MachineError, UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.pipeline import run
from dist_transformer.pipeline import state as module
from dist_transformer.pipeline.results import status_rows
from dist_transformer.pipeline.run import begin, locked, set_aside, words_of
from dist_transformer.pipeline.schema import KINDS, RECORD, Pipeline
from dist_transformer.pipeline.state import State, complete, input_problems, states_of
from dist_transformer.processes.children import forwarding_signals
from dist_transformer.run.folder import RunDir


def test_what_is_made_is_done_and_stays_done(folder):
    pipeline = pipeline_in(folder)
    assert {state.state for state in states_of(pipeline).values()} == {"new"}
    make_all(pipeline)
    assert due(pipeline) == {}
    assert {row[2] for row in status_rows(pipeline, states_of(pipeline), {})} == {"done"}
    later = pipeline_in(folder, "nodes.teacher.ranks=2", "nodes.other.max_tokens=99", "set.slurm.nodes=3",
                        "nodes.forward.slurm.nodes=2", "set.tracking.enabled=false", "nodes.forward.too_long=split")  # fmt: skip
    assert due(later) == {}


def test_the_size_of_batches_counts_where_translations_depend_on_them(folder):
    """Lines of a batch share the shortlist of CTranslate2."""
    engine = "nodes.other.engine=ctranslate2"
    make_all(pipeline_in(folder, engine))
    assert due(pipeline_in(folder, engine, "nodes.other.max_tokens=99")) == {"other": "changed: settings"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("train.en", {"teacher": "changed: train.en", "forward": "changed: teacher", "kept": "changed: forward"}),
        ("mono", {"forward": "changed: mono", "kept": "changed: mono, forward", "other": "changed: mono"}),
        ("scores", {"kept": "changed: scores"}),
        ("made/model.safetensors", {"other": "changed: made/model.safetensors"}),
    ],
)
def test_a_changed_file_makes_its_nodes_and_what_follows_begin_anew(change, expected, folder):
    make_all(pipeline_in(folder))
    times = (folder / change).stat()
    text = (folder / change).read_bytes()
    (folder / change).write_bytes(text[:-1] + b"x")  # of the same size
    found = due(pipeline_in(folder))
    assert found == expected
    (folder / change).write_bytes(text)  # at another time
    assert due(pipeline_in(folder)) == {}
    os.utime(folder / change, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert due(pipeline_in(folder)) == {}


LIMITS = {"decoding": {"max_source_tokens": 2048, "max_tokens": 8192}}
"""Settings that the version before counted, at their defaults."""
SCORED = "set.data.train.filters={scores: {quality: 0.5}}"


def test_a_changed_or_missing_file_of_quality_scores_is_noticed(folder):
    with pytest.raises(ConfigError, match=r"filters\.scores\.quality: no such file: .*quality"):
        states_of(pipeline_in(folder, SCORED))
    (folder / "quality").write_text("1\n0\n")
    make_all(pipeline_in(folder, SCORED))
    assert due(pipeline_in(folder, SCORED)) == {}
    (folder / "quality").write_text("0\n1\n")
    assert due(pipeline_in(folder, SCORED))["teacher"] == "changed: quality (scores)"


def test_a_node_of_the_version_before_which_counted_no_scores_stays_done_until_something_else_changes(
    folder, monkeypatch
):
    (folder / "quality").write_text("1\n0\n")
    with monkeypatch.context() as patch:
        patch.setattr(
            module, "_sums", lambda files: {name: each[-1] for name, each in files.items() if "quality" not in name}
        )
        make_all(pipeline_in(folder, SCORED))
    assert due(pipeline_in(folder, SCORED)) == {}
    (folder / "train.en").write_text("2\n1\n")
    assert due(pipeline_in(folder, SCORED))["teacher"] == "changed: quality (scores), train.en"
    make_all(pipeline_in(folder, SCORED))
    (folder / "quality").write_text("0\n1\n")
    assert due(pipeline_in(folder, SCORED))["teacher"] == "changed: quality (scores)"


def test_changed_settings_and_another_version_begin_anew(folder, monkeypatch):
    make_all(pipeline_in(folder))
    assert due(pipeline_in(folder, "nodes.kept.drop=0.2")) == {"kept": "changed: settings"}
    assert due(pipeline_in(folder, "set.training.max_steps=6"))["teacher"] == "changed: settings"
    (folder / "base.yaml").write_text(f"# the same\n{CONFIG}")
    assert due(pipeline_in(folder)) == {}
    (folder / "base.yaml").write_text(CONFIG.replace("5", "7"))
    assert [*due(pipeline_in(folder))] == ["teacher", "forward", "kept"]
    (folder / "base.yaml").write_text(CONFIG)
    monkeypatch.setattr(module, "__version__", "another")
    assert set(due(pipeline_in(folder)).values()) >= {"changed: version"}


def test_a_run_resumes_with_other_settings_on_which_no_result_depends(folder):
    """Such as those that a message recommends to a run that was interrupted."""
    make(pipeline_in(folder), "teacher", states_of(pipeline_in(folder))["teacher"], is_whole=False)
    free = ("training.hang_seconds=7200", "training.max_hours=3", "training.log_every_steps=7", "data.loader_workers=0",
            "decoding.max_source_tokens=9", "decoding.max_tokens=99")  # fmt: skip
    pipeline = pipeline_in(folder, *(f"set.{each}" for each in free), "set.data.audit=true")
    assert (states_of(pipeline)["teacher"].state, states_of(pipeline)["teacher"].restarts) == ("begun", False)
    begin(pipeline, "teacher", states_of(pipeline)["teacher"])
    assert "hang_seconds: 7200" in (pipeline.folder("teacher") / "settings.yaml").read_text()


def test_a_stop_before_anything_runs_sets_nothing_aside(folder, monkeypatch):
    """As while files are hashed."""
    make(pipeline_in(folder), "teacher", states_of(pipeline_in(folder))["teacher"], is_whole=False)
    changed = "set.training.max_steps=6"

    def stopped(pipeline: Pipeline) -> dict[str, State]:
        os.kill(os.getpid(), signal.SIGTERM)
        return states_of(pipeline)

    monkeypatch.setattr(cli, "states_of", stopped)
    done = CliRunner().invoke(cli.app, ["run", str(folder / "pipeline.yaml"), changed])
    assert done.exit_code == EXIT_REQUEUE
    assert [path.name for path in (folder / "root").iterdir() if path.is_dir()] == ["teacher"]
    assert states_of(pipeline_in(folder, changed))["teacher"].why == "changed: settings"


def test_a_file_that_several_nodes_read_is_hashed_once(folder, monkeypatch):
    hashed, sha256 = list[Path](), module.file_sha256
    monkeypatch.setattr(module, "file_sha256", lambda path: hashed.append(path) or sha256(path))
    states = states_of(pipeline_in(folder))
    assert sorted(hashed) == sorted({*hashed})
    assert {*map(str, hashed)} >= {str(folder / name) for name in ("mono", "train.en")}
    sums = [states[name].now["files"]["mono"][-1] for name in ("forward", "kept", "other")]
    assert sums == [sha256(folder / "mono")] * 3


def test_a_prepared_corpus_depends_on_no_setting_of_training_alone(folder):
    text = (folder / "pipeline.yaml").read_text()
    (folder / "pipeline.yaml").write_text(f"{text}  corpus: {{kind: prepare, config: base.yaml}}\n")
    make_all(pipeline_in(folder))
    changed = (
        "training.max_steps=6",
        "model.norm=pre",
        "optimizer.learning_rate=0.01",
        "data.lanes=3",
        "data.max_tokens=999",
    )
    assert "corpus" not in due(pipeline_in(folder, *(f"set.{each}" for each in changed)))
    for each in ("data.filters.max_tokens=99", "tokenizer.vocabulary_size=99", "run.seed=3", "data.target_language=fr"):
        assert due(pipeline_in(folder, f"set.{each}"))["corpus"] == "changed: settings", each


def test_code_of_the_users_own_counts_with_its_content(folder):
    (folder / "rule.py").write_text("def keep(source, target):\n    return True\n")
    plugin = f"set.data.filters.plugin={folder}/rule.py:keep"
    make_all(pipeline_in(folder, plugin))
    assert due(pipeline_in(folder, plugin)) == {}
    (folder / "rule.py").write_text("def keep(source, target):\n    return False\n")
    assert [*due(pipeline_in(folder, plugin))] == ["teacher", "forward", "kept"]


def test_results_that_are_gone_or_edited_are_made_again_with_what_follows(folder):
    pipeline = pipeline_in(folder)
    make_all(pipeline)
    (pipeline.folder("forward") / "text").write_text("edited")
    assert due(pipeline) == {"forward": "its results are not as it made them", "kept": "follows forward"}
    make_all(pipeline)
    assert (pipeline.root / "forward.1" / "text").read_text() == "edited"
    assert due(pipeline) == {}
    (pipeline.folder("forward") / "text").unlink()
    assert due(pipeline) == {"forward": "its results are gone", "kept": "follows forward"}
    shutil.rmtree(pipeline.folder("teacher"))
    assert due(pipeline) == {"teacher": "", "forward": "its results are gone", "kept": "follows forward"}
    make_all(pipeline)
    assert (pipeline.root / "kept.2").is_dir()


@pytest.mark.parametrize("place", ["root", "wörter \N{SNOWMAN}", "b\\\\s", "train"])
def test_a_pipeline_that_is_moved_stays_done(place, folder):
    """Also where a folder beside it begins with its name."""
    (folder / "train_text").mkdir()
    (folder / "train_text" / "mono").write_text("1\n2\n")
    more = (
        "nodes.forward.input=train_text/mono",
        f"nodes.kept.source={folder}/train_text/mono",
        f"nodes.other.model={folder}/elsewhere/old/made",
    )
    here = (f"root={folder}/{place}", *more[:2], f"nodes.other.model={folder}/{place}/old/made")
    shutil.copytree(folder / "made", folder / place / "old" / "made")
    make_all(pipeline_in(folder, *here))
    (folder / place).rename(folder / "elsewhere")
    assert due(pipeline_in(folder, f"root={folder}/elsewhere", *more)) == {}


def test_the_settings_that_are_counted_have_not_changed(folder):
    """Else each node that a user has made is made again. For a setting that is new, or gone, or has another default,
    AS_BEFORE gets an entry, the next test a case, and here is the digest of what is counted from now on."""
    pipeline = pipeline_in(folder)
    counted = [module.what_goes_in(pipeline, name)[0] for name in ("teacher", "forward", "kept")]
    text = module._moved(json.dumps(counted, sort_keys=True), pipeline.root)
    assert module.json_digest(text) == "74367475c7d54605023c13e884eead3d21f2fb1be13e9c363e85ddd88265090d"


@pytest.mark.parametrize(
    ("is_bare", "is_last", "has_compiler"),
    [(True, False, False), (False, False, False), (False, True, False), (False, True, True)],
)
def test_a_node_that_a_version_before_has_made_stays_done(folder, is_bare, is_last, has_compiler):
    """One cut the root as bare text: out of its name in those beside it too, but not where JSON escapes it. Both counted
    every setting, and the default of max_steps beside max_epochs; the last one did not count some, but limits of a search.
    The others had no setting `matrices`, and none `tokenizer.normalization`; some had `compile_layers`."""
    base = folder / "base.yaml"
    base.write_text(base.read_text().replace("max_steps: 5", "max_epochs: 5"))
    (folder / "würfe_text").mkdir()
    (folder / "würfe_text" / "mono").write_text("1\n2\n")
    pipeline = pipeline_in(folder, f"root={folder}/würfe", "nodes.forward.input=würfe_text/mono")
    make_all(pipeline)
    keys: dict[str, str] = {}
    for name, node in pipeline.nodes.items():
        record = read_json(pipeline.folder(name) / module.RECORD)
        settings = module.what_goes_in(pipeline, name)[0][0]
        if node.kind == "train":
            settings[1] |= {key: {**settings[1][key], **values} for key, values in LIMITS.items()}
            every = json.loads(module.configuration(pipeline, name).model_dump_json())
            settings[1] |= {} if is_last else {key: {**every[key], **settings[1][key]} for key in ("training", "data")}
            settings[1]["data"].pop("root", None)
            if has_compiler:
                settings[1]["training"]["compile_layers"] = False
            else:
                del settings[1]["tokenizer"]["normalization"]
            settings[1]["optimizer"] = {
                key: value for key, value in every["optimizer"].items() if key != "matrices" or is_last
            }
        elif node.kind == "translate":
            settings = [{**settings[0], "too_long": None}]
        text = json.dumps(settings, sort_keys=True).replace('"max_steps": null', '"max_steps": 100000')
        text = text.replace(str(pipeline.root), "") if is_bare else module._moved(text, pipeline.root)
        record["made_of"]["settings"] = module.json_digest(text)
        record["made_of"]["nodes"] = {other: keys[other] for other in node.reads}
        keys[name] = record["key"] = module.json_digest(record["made_of"])
        write_json(pipeline.folder(name) / module.RECORD, record)
    assert due(pipeline) == {}
    again = ("nodes.forward.too_long=split", "nodes.other.too_long=refuse")
    assert due(pipeline_in(folder, f"root={folder}/würfe", "nodes.forward.input=würfe_text/mono", *again)) == {}


def test_a_pipeline_that_another_process_runs_is_a_fault_that_may_pass_if_it_does_not_say_who_it_is(tmp_path):
    with FileLock(tmp_path / "lock"), pytest.raises(MachineError) as told, locked(tmp_path, wait_seconds=0):
        pass
    assert str(told.value).endswith(
        "and does not say who it is: a pipeline, and each node, is run by one process at a time; wait, or stop that one"
    )


def test_a_node_that_was_killed_resumes_unless_what_it_reads_begins_anew(folder):
    pipeline = pipeline_in(folder)
    states = states_of(pipeline)
    make(pipeline, "teacher", states["teacher"], is_whole=False)
    assert due(pipeline)["teacher"] == ""
    assert not states_of(pipeline)["teacher"].restarts
    assert states_of(pipeline)["teacher"].state == "begun"
    make(pipeline, "teacher", states_of(pipeline)["teacher"])
    make(pipeline, "forward", states_of(pipeline)["forward"], is_whole=False)
    assert [name for name, state in states_of(pipeline).items() if not state.restarts] == ["teacher", "forward"]
    (folder / "train.de").write_text("3\n4\n")
    assert states_of(pipeline_in(folder))["forward"].restarts


def test_a_verb_that_ended_before_it_was_noted_is_done(folder):
    pipeline = pipeline_in(folder)
    make(pipeline, "teacher", states_of(pipeline)["teacher"])
    record = pipeline.folder("teacher") / "node.json"
    noted = read_json(record)
    write_json(record, {key: value for key, value in noted.items() if key not in ("done", "made")})
    assert states_of(pipeline)["teacher"].state == "done"
    set_aside(pipeline, {"teacher": states_of(pipeline)["teacher"]})
    assert read_json(record)["made"] == noted["made"]


def test_a_record_that_cannot_be_read_for_a_moment_makes_no_node_new_and_is_not_written_over(folder, monkeypatch):
    pipeline = pipeline_in(folder)
    make_all(pipeline)
    with stuttering(errno.EIO, {RECORD, "run.json"}):
        assert due(pipeline) == {}
    with stuttering(errno.EIO, {RECORD}, FOR_GOOD), pytest.raises(MachineError, match=f"{RECORD}: cannot be read now"):
        due(pipeline)
    (folder / "mono").write_text("another\n")
    states = states_of(pipeline)
    begin(pipeline, "other", states["other"])
    (pipeline.folder("other") / KINDS["translate"].made[0]).unlink()
    monkeypatch.setattr(run, "run_program", lambda *_: EXIT_USER_ERROR)
    with forwarding_signals() as signals, stuttering(errno.EIO, {RECORD}):
        assert run.run_node(pipeline, "other", signals) == EXIT_USER_ERROR
    noted = read_json(pipeline.folder("other") / RECORD)
    assert noted["ended"] == EXIT_USER_ERROR
    assert noted["key"] == states["other"].now["key"]


def test_a_node_was_done_when_its_results_were_written_whenever_that_is_noted(folder):
    pipeline = pipeline_in(folder)
    begin(pipeline, "other", states_of(pipeline)["other"], "submitted")
    for number, made in enumerate(KINDS["translate"].made):
        (pipeline.folder("other") / made).write_text("1\n")
        os.utime(pipeline.folder("other") / made, (1000 - number, 1000 - number))

    def row() -> list[str]:
        return next(row for row in status_rows(pipeline, states_of(pipeline), {}) if row[0] == "other")

    seen = row()
    assert seen[2:5] == [
        "done",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(1000)),
        "-",
    ]  # when it began is not known
    complete(pipeline, "other")
    assert read_json(pipeline.folder("other") / "node.json")["done"] == 1000
    assert row() == seen


def test_a_training_job_notes_when_it_began(folder):
    pipeline = pipeline_in(folder)
    teacher = RunDir(pipeline.folder("teacher"))
    begin(pipeline, "teacher", states_of(pipeline)["teacher"], "submitted")
    teacher.attempts.parent.mkdir()
    teacher.attempts.write_text(
        '{"event": "began", "time": 900, "job": "1"}\n{"event": "began", "time": 990, "job": "1"}\n'
    )
    (teacher.path / "model").mkdir()
    (teacher.path / "model" / "model.safetensors").write_text("weights")
    os.utime(teacher.path / "model" / "model.safetensors", (1000, 1000))
    write_json(teacher.state, {"state": "finished", "step": 5})
    complete(pipeline, "teacher")
    assert status_rows(pipeline, states_of(pipeline), {})[0][4] == "1 min 40 s"


def test_a_folder_of_somebody_else_is_refused_and_nothing_is_renamed(folder):
    pipeline = pipeline_in(folder)
    make(pipeline, "teacher", states_of(pipeline)["teacher"])
    (folder / "train.en").write_text("changed\n")
    (pipeline.folder("forward")).mkdir()
    (pipeline.folder("forward") / "thesis.txt").write_text("years of work")
    before = sorted(pipeline.root.rglob("*"))
    with pytest.raises(UserError, match=r"forward: is there already \(a folder with thesis.txt\)"):
        set_aside(pipeline_in(folder), states_of(pipeline_in(folder)))
    assert [path for path in sorted(pipeline.root.rglob("*")) if path.name != "lock"] == before


def test_a_node_is_not_pulled_away_from_under_one_that_is_no_longer_in_the_file_and_reads_it(folder):
    pipeline = pipeline_in(folder)
    make_all(pipeline)
    text = (folder / "pipeline.yaml").read_text()
    kept = [line for line in text.splitlines() if "kept:" not in line]
    (folder / "pipeline.yaml").write_text("\n".join(kept).replace("forward:", "renamed:"))
    (folder / "train.en").write_text("changed\n")
    changed = pipeline_in(folder)
    with FileLock(RunDir(pipeline.folder("kept")).lock):  # reads forward alone, which stays where it is
        with FileLock(RunDir(pipeline.folder("forward")).lock):
            said = "root/forward: reads what must begin anew, but a process works in it: wait for it, or stop it first"
            with pytest.raises(UserError, match=said):
                set_aside(changed, states_of(changed))
        assert not [*pipeline.root.glob("*.1")]
        set_aside(changed, states_of(changed))
    assert {path.name for path in pipeline.root.glob("*.1")} == {"teacher.1"}


def test_missing_files_and_wrong_settings_are_told_together_with_their_lines(folder):
    (folder / "mono").unlink()
    with pytest.raises(ConfigError) as error:
        states_of(pipeline_in(folder, "nodes.teacher.set.training.max_stps=3"))
    missing = [f"nodes.{key}: no such file: {folder}/mono" for key in ("forward.input", "kept.source", "other.input")]
    expected = ["training.max_stps: no such key; did you mean `max_steps`?", *missing]
    assert len(error.value.problems) == 4
    for text in expected:
        [problem] = [problem for problem in error.value.problems if problem.endswith(text)]
        assert problem.startswith((f"{folder}/pipeline.yaml:", "command line: nodes.teacher.set"))


def test_files_below_the_root_that_no_node_makes_are_inputs(folder):
    """The text, and older results that a node reads: the folders of nodes alone are what they make."""
    text = folder / "root" / "text"
    text.mkdir(parents=True)
    for name in ("mono", "scores", "train.en", "train.de", "made"):
        (folder / name).rename(text / name)
    here = f"data_root={text}"
    make_all(pipeline_in(folder, here, f"nodes.kept.source={text}/mono"))
    (folder / "root").rename(folder / "moved")
    text = folder / "moved" / "text"
    moved = (f"root={folder}/moved", f"data_root={text}", f"nodes.kept.source={text}/mono")
    assert due(pipeline_in(folder, *moved)) == {}
    (text / "scores").write_text("2\n1\n")
    assert due(pipeline_in(folder, *moved)) == {"kept": "changed: scores"}
    (text / "train.de").write_text("2\n1\n")
    assert due(pipeline_in(folder, *moved))["teacher"] == "changed: train.de"


@pytest.mark.parametrize("place", ["root/text", "root.1", "root-text", "root/forward.1", "root/teacher/../text"])
def test_missing_files_are_told_wherever_no_node_makes_them(place, folder):
    given = [f"nodes.forward.input={folder}/{place}/a", f"set.tokenizer.source_model={folder}/{place}/c"]
    with pytest.raises(ConfigError) as error:
        states_of(pipeline_in(folder, *given, f"set.data.test.path={folder}/{place}/b"))
    told = " ".join(problem for problem in error.value.problems if "no such file" in problem)
    for key in ("nodes.forward.input", "data.test.path", "tokenizer.source_model"):
        assert told.count(f" {key}: no such file: {folder}/") == 1, told
    made = ("root/forward/text", "root/teacher/model/source.model", "root/text/../kept/source")
    keys = {"data.test.path": made[0], "tokenizer.source_model": made[1], "training.init_from": "root/teacher"}
    given = [f"set.{key}={folder}/{each}" for key, each in keys.items()]
    assert states_of(pipeline_in(folder, *given, f"nodes.other.input={folder}/{made[2]}"))


def test_a_shortlist_of_a_run_that_makes_no_lexicon_is_told_before_anything_runs(folder):
    export = "nodes.int8={kind: export, model: {node: teacher}, shortlist: [{node: teacher, output: lexicon}]}"
    with pytest.raises(ConfigError) as error:
        states_of(pipeline_in(folder, export))
    [problem] = error.value.problems
    assert problem.endswith(
        "nodes.int8.shortlist: teacher makes no lexicon; set training.guided_alignment there, as 0.1"
    )
    pipeline = pipeline_in(folder, export, "nodes.teacher.set.training.guided_alignment=0.1")
    assert states_of(pipeline)["int8"].state == "new"
    assert words_of(pipeline, "int8")[-2:] == ["--shortlist", f"{pipeline.root}/teacher/lexicon.npz"]
    texts = pipeline_in(folder, "nodes.int8={kind: export, model: made, shortlist: [train.en, train.de]}")
    assert [*states_of(texts)["int8"].now["files"]] == ["made/model.safetensors", "train.en", "train.de"]


def test_a_node_that_would_load_a_network_of_a_plug_in_is_told_before_anything_runs(folder):
    averaged = "nodes.averaged={kind: average, run: {node: teacher}}"
    likely = "nodes.likely={kind: score, model: {node: averaged}, source: mono, target: {node: forward}}"
    pipeline = pipeline_in(folder, averaged, likely, f"nodes.teacher.set.model.plugin={folder}/network.py:build")
    (folder / "network.py").write_text("def build(): ...\n")
    assert states_of(pipeline)["likely"].state == "new"
    problems = input_problems(pipeline, pipeline.nodes)
    said = "is a network of model.plugin, which no node can load; leave this node out"
    assert [problem.rpartition(" nodes.")[2] for problem in problems] == [
        f"forward.model: {said}",
        f"likely.model: {said}",
    ]
    assert input_problems(pipeline_in(folder, averaged, likely), pipeline.nodes) == []


def test_the_words_of_a_node_are_those_of_its_verb(folder):
    pipeline = pipeline_in(folder, "nodes.other.seed=0", "nodes.other.sampling=true", "nodes.forward.ensemble=[made]")
    root = pipeline.root
    scored = pipeline_in(folder, "nodes.likely={kind: score, model: made, source: mono, target: mono}")
    assert words_of(scored, "likely")[-3:] == ["--per-token", "--too-long", "lowest"]
    assert words_of(pipeline, "teacher") == ["train", f"{root}/teacher/settings.yaml", "--ranks=1"]
    assert words_of(pipeline, "other") == [
        "translate", f"{folder}/made", "--input", f"{folder}/mono", "--sampling", "--seed", "0", "--ranks", "1",
        "--output", f"{root}/other/text",
    ]  # fmt: skip
    assert words_of(pipeline, "forward")[1:6] == [
        f"{root}/teacher",
        "--input",
        f"{folder}/mono",
        "--ensemble",
        f"{folder}/made",
    ]
