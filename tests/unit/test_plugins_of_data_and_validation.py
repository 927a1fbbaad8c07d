"""A source and a validation metric of the user's own (docs/plugins.md)."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prepare_helpers import NUM_TRAIN, config_of, read_split, write_text
from running import Command, records

from dist_transformer.config.loading import load_config, with_absolute_paths
from dist_transformer.data.prepare.preparation import prepare, prepared_folder
from dist_transformer.data.sources.corpus import read_corpus
from dist_transformer.errors import ConfigError, DataError, UserError
from dist_transformer.files import file_sha256
from dist_transformer.plugins import find, measure_of
from dist_transformer.run.resume_checks import METRIC, differs

SOURCE = """
from itertools import islice
from dist_transformer.data.sources.demo_corpus import demo_pairs

def pairs():
    yield from islice(demo_pairs("test"), {most})
"""
METRIC_OF_LENGTHS = """
def score(hypotheses, references, sources):
    assert len(hypotheses) == len(references) == len(sources)
    open("seen.txt", "w").write(sources[0] + "|" + references[0])
    return -sum(abs(len(ours) - len(theirs)) for ours, theirs in zip(hypotheses, references)) / len(references)
"""

STUB_OF_COMET = """
import logging
from types import SimpleNamespace
import torch

logging.basicConfig(level=logging.DEBUG, handlers=[logging.NullHandler()], force=True)

class Model:
    def eval(self):
        return self
    def to(self, device):
        return self
    def prepare_for_inference(self, samples):
        assert 1 <= len(samples) <= 16
        equal = [each["mt"] == each["ref"] and each["src"] != each["mt"] for each in samples]
        return ({"inputs": [torch.tensor(equal)]},)
    def predict_step(self, inputs):
        return SimpleNamespace(scores=inputs[0]["inputs"][0].float())

def download_model(name):
    assert name == "Unbabel/wmt22-comet-da"
    return "a file"

def load_from_checkpoint(file):
    assert file == "a file"
    return Model()
"""


@pytest.fixture
def comet() -> Iterator[str]:
    """The name of the example, which no other test finds loaded."""
    file = Path(__file__).parents[2] / "examples" / "comet_score.py"
    yield f"{file}:score"
    for name in ("comet", f"dist_transformer_plugin_{file_sha256(file)[:16]}"):
        sys.modules.pop(name, None)


def with_source(folder: Path, text: str) -> dict[str, dict[str, object]]:
    file = folder / "my_source.py"
    file.write_text(text, encoding="utf-8")
    return {"data": config_of(folder).data.model_dump(exclude_unset=True) | {"train": {"plugin": f"{file}:pairs"}}}


def test_a_corpus_of_a_plug_in_is_prepared_as_the_same_text_in_files(tmp_path: Path):
    write_text(tmp_path)
    of_files, of_plugin = (
        config_of(tmp_path),
        config_of(tmp_path, **with_source(tmp_path, SOURCE.format(most=NUM_TRAIN))),
    )
    rows = []
    for config in (of_files, of_plugin):
        rows.append(read_split(prepared_folder(config), prepare(config), "train"))
    assert rows[0] == rows[1]
    assert len(rows[0]) > NUM_TRAIN / 2


def test_a_changed_source_is_another_corpus(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path, **with_source(tmp_path, SOURCE.format(most=NUM_TRAIN)))
    folder = prepared_folder(config)
    prepare(config, folder)
    with_source(tmp_path, SOURCE.format(most=NUM_TRAIN - 1))
    assert prepared_folder(config) != folder
    with pytest.raises(DataError, match=r"prepared with other settings or another text:\n.*plugin.*SHA-256"):
        prepare(config, folder)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    yield 'a', 'b'\n    raise OSError('the disk is gone')", "OSError: the disk is gone"),
        ("    yield 'a', 'b'\n    yield 'c', None", r"pair 2 is \('c', None\), expected a tuple of two strings"),
        ("    return 3", "TypeError"),
        ("    yield 'a', 'b'\n    yield 'bad \\ud800', 'd'", r"pair 2: not valid Unicode: half .*bad_encoding to drop"),
    ],
)
def test_an_error_in_a_source_is_one_message(tmp_path: Path, body: str, said: str):
    write_text(tmp_path)
    config = config_of(tmp_path, **with_source(tmp_path, f"def pairs():\n{body}\n"))
    assert config.data.train is not None
    with pytest.raises(UserError, match=said):
        list(read_corpus(config.data.train, config.data, 10))


def test_half_a_surrogate_pair_of_a_source_is_marked_where_it_is_to_be_dropped(tmp_path: Path):
    write_text(tmp_path)
    sections = with_source(tmp_path, "def pairs():\n    yield 'a', 'b'\n    yield 'c', 'bad \\ud800'\n")
    data = config_of(tmp_path, data={**sections["data"], "filters": {"bad_encoding": "drop"}}).data
    assert data.train is not None
    (batch,) = read_corpus(data.train, data, 10)
    assert (batch.target, batch.bad_encoding) == (["b", "bad \ufffd"], {1})


def test_every_missing_plug_in_is_reported_with_its_key(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(
        "data:\n  mixture:\n    corpora:\n      one: {plugin: 'gone.py:pairs'}\n  test: {plugin: 'lost.py:pairs'}\n"
        "validation: {plugin: 'away.py:score'}\n", encoding="utf-8",
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "a.yaml")
    keys = ("data.mixture.corpora.one.plugin: ", "data.test.plugin: ", "validation.plugin: ")
    assert all(any(f": {key}" in problem for problem in caught.value.problems) for key in keys)
    assert len(caught.value.problems) == len(keys)


def test_every_plug_in_of_a_run_folder_has_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    data = {
        "mixture": {"corpora": {"one": {"plugin": "one.py:pairs"}}},
        "train": None,
        "test": {"plugin": "two.py:pairs"},
    }
    config = with_absolute_paths(config_of(tmp_path, data=data, validation={"plugin": "three.py:score"}), None)
    assert config.data.mixture is not None
    assert config.data.test is not None
    found = [config.data.mixture.corpora["one"].plugin, config.data.test.plugin, config.validation.plugin]
    assert found == [f"{tmp_path}/one.py:pairs", f"{tmp_path}/two.py:pairs", f"{tmp_path}/three.py:score"]


@pytest.mark.parametrize(
    ("before", "now", "is_refused"), [("a", "b", True), ("a", "a", False), (None, "a", False), ("a", None, False)]
)
def test_a_resume_may_add_or_drop_a_metric_and_not_change_it(before: str | None, now: str | None, is_refused: bool):
    assert differs(METRIC, {METRIC: before}, {METRIC: now}) == is_refused
    assert differs("model.plugin", {"model.plugin": before}, {"model.plugin": now}) == (before != now)


@pytest.mark.slow
def test_a_metric_of_a_plug_in_chooses_the_best_checkpoint_and_is_missed_when_it_has_changed(
    train_small: Callable[..., Path], command: Command
):
    file = command.folder / "my_metric.py"
    file.write_text(METRIC_OF_LENGTHS, encoding="utf-8")
    settings = (
        "training.max_steps=4", "checkpoints.every_steps=2", "checkpoints.keep_best=1", "validation.every_steps=2",
        "validation.translate=true", "validation.max_sentences=4", "validation.plugin=my_metric.py:score",
        "validation.metric=plugin", "checkpoints.final_model=average_best",
    )  # fmt: skip
    run = train_small("metric", *settings)
    scores = [record["plugin"] for record in records(run, "validation")]
    assert len(scores) == 2
    assert all(score <= 0 for score in scores)
    assert "|" in (command.folder / "seen.txt").read_text(encoding="utf-8")
    signature = f"score of a file with SHA-256 {file_sha256(file)}"
    assert {record["plugin_signature"] for record in records(run, "validation")} == {signature}
    said = command("evaluate", run, "--split", "validation", "--metric-plugin", "my_metric.py:score")
    kept = json.loads((run / "evaluation" / "validation.json").read_text(encoding="utf-8"))
    assert f"plug-in {kept['plugin']:.4f}  {signature}" in said
    file.write_text(METRIC_OF_LENGTHS.replace("/ len", "* len"), encoding="utf-8")
    said = command("train", "small.yaml", "run.name=metric", *settings, "training.max_steps=6", code=2)
    assert "validation.plugin" in said
    assert "SHA-256" in said


def test_a_metric_that_ends_the_program_is_one_message(tmp_path: Path):
    (tmp_path / "ends.py").write_text("import sys\ndef score(*_):\n    sys.exit(3)\n", encoding="utf-8")
    score = measure_of(find("validation.plugin", f"{tmp_path}/ends.py:score"))
    with pytest.raises(UserError, match=r"validation.plugin: score of .*ends.py, line 3: SystemExit: 3"):
        score([], [], [])


def test_a_metric_that_changes_its_lists_changes_none_of_the_validation(tmp_path: Path):
    code = "def score(*lists):\n    for each in lists:\n        each.sort()\n        each.pop()\n    return 1\n"
    (tmp_path / "sorts.py").write_text(code, encoding="utf-8")
    lists = [["b", "a"], ["d", "c"], ["f", "e"]]
    assert measure_of(find("validation.plugin", f"{tmp_path}/sorts.py:score"))(*lists) == 1.0
    assert lists == [["b", "a"], ["d", "c"], ["f", "e"]]


def test_the_example_of_comet_is_the_mean_over_all_batches_and_keeps_our_logging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comet: str
):
    (tmp_path / "comet.py").write_text(STUB_OF_COMET, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(logging.root.handlers), logging.root.level
    score = measure_of(find("validation.plugin", comet))
    assert (logging.root.handlers, logging.root.level) == before
    lines = [f"line {number}" for number in range(40)]
    assert score(lines, lines[:30] + ["other"] * 10, ["source"] * 40) == 0.75


def test_the_example_of_comet_without_its_package_is_one_message(monkeypatch: pytest.MonkeyPatch, comet: str):
    monkeypatch.setitem(sys.modules, "comet", None)
    with pytest.raises(UserError, match=r"validation.plugin: score of .*comet_score.py, line 1\d: .*comet") as caught:
        measure_of(find("validation.plugin", comet))
    assert "\n" not in str(caught.value)
