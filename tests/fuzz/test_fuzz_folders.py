"""Prepared corpora and checkpoints with anything in their files: used as they are, or refused with a message."""

import contextlib
import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from checkpoint_helpers import RUN_ID, MemoryEngine, save
from forked_command import bounded, must_end_in_a_message
from hypothesis import given
from hypothesis import strategies as st
from mutated_runs import changed, copy_of, damaged
from prepare_helpers import config_of, write_text
from tokenised_models import demo_tokenizers

from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.data import manifest as manifests
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare.preparation import prepare
from dist_transformer.data.prepare.scan import load_tokenizer
from dist_transformer.errors import DataError, UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.checkpoints import Checkpoint
from dist_transformer.training.checkpoint.tensor_files import MANIFEST, STATE
from dist_transformer.training.inspect_batch import batch_of_step
from dist_transformer.training.run_data import open_run_data

pytestmark = pytest.mark.slow

SEEDS = st.integers(0, 2**32)
MOST_SECONDS = 60


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """What takes a minute, where milliseconds are enough, hangs: an error with the line."""

    def interrupt(*_: object) -> None:
        raise AssertionError("hangs")

    signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, its configuration, and what was prepared of it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder)
    prepare(config_of(folder), folder / "prepared")
    (folder / "config.yaml").write_text(to_yaml(config_of(folder, data={"prepared": f"{folder}/prepared"})), "utf-8")
    return folder


@contextlib.contextmanager
def changed_file(path: Path) -> Iterator[bytes]:
    """Gives the content of a file, which it has again after the block."""
    content = path.read_bytes()
    try:
        yield content
    finally:
        path.write_bytes(content)


def use(corpus: Path) -> None:
    """All that a start of training reads of a prepared corpus, up to the first batch."""
    folder = corpus / "prepared"
    manifest = Manifest.load(folder)
    data = open_run_data(config_of(corpus), folder, manifest)
    load_tokenizer(folder, manifest.tokenizer)
    data.recipe()
    batch_of_step(data, None, 1)
    list(data.validation())


def signed_manifest(value: Any) -> Any:
    """The same with the digest of its content, where it has one: damage that was done on purpose."""
    with contextlib.suppress(Exception):
        splits = {name: manifests.split_from_json(split) for name, split in value["splits"].items()}
        files = manifests.TokenizerFiles(**value["tokenizer"])
        value["digest"] = manifests.content_digest(value["recipe"], files, splits, tuple(value["training"]))
    return value


def test_a_whole_corpus_is_used(corpus):
    use(corpus)


@bounded(50)
@given(SEEDS, st.booleans())
def test_a_manifest_of_other_values_is_used_or_refused_with_a_message(corpus, seed, is_signed):
    path, draw = corpus / "prepared/manifest.json", random.Random(seed)
    with changed_file(path) as content:
        value = json.loads(content)
        for _ in range(draw.choice([1, 1, 1, 2, 4])):
            value = changed(value, draw)
        path.write_text(json.dumps(signed_manifest(value) if is_signed else value), encoding="utf-8")
        with ending(), contextlib.suppress(DataError):
            use(corpus)


@pytest.mark.parametrize("file", ["../outside", "shards/../../outside", "/etc/passwd", "", ".."])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_tokenizer_outside_of_the_folder_is_refused_by_name(corpus, file, side):
    path = corpus / "prepared/manifest.json"
    with changed_file(path) as content:
        value = json.loads(content)
        value["tokenizer"][side] = file
        path.write_text(json.dumps(signed_manifest(value)), encoding="utf-8")
        with pytest.raises(DataError, match=f"{re.escape(repr(file))}, which is no file of the prepared folder"):
            Manifest.load(path.parent)


@pytest.mark.parametrize("file", ["../outside", "shards/../../outside", "shards/\0"])
def test_a_shard_outside_of_the_folder_is_refused_by_name(corpus, file):
    path = corpus / "prepared/manifest.json"
    with changed_file(path) as content:
        value = json.loads(content)
        value["splits"]["train"]["shards"][0]["file"] = file
        path.write_text(json.dumps(signed_manifest(value)), encoding="utf-8")
        with pytest.raises(DataError, match=f"{re.escape(repr(file))}, which is no file of the prepared folder"):
            Manifest.load(path.parent)


def test_a_corpus_with_another_tokenizer_is_refused(corpus):
    with changed_file(corpus / "prepared/tokenizer/source.model"):
        (corpus / "prepared/tokenizer/source.model").write_bytes(demo_tokenizers(corpus, True).source.read_bytes())
        with pytest.raises(DataError, match="its tokenizer is not the one"):
            use(corpus)


@bounded(12)
@given(
    SEEDS,
    st.sampled_from(
        ["manifest.json", "shards/train-00000.parquet", "shards/validation-00000.parquet", "tokenizer/source.model"]
    ),
)
def test_any_damage_to_the_bytes_of_a_prepared_corpus_is_told_in_a_message(corpus, seed, name):
    """In a process of its own: a library that dies of them must not take the tests with it."""
    path = corpus / "prepared" / name
    with changed_file(path) as content:
        path.write_bytes(damaged(content, random.Random(seed)))
        with mock.patch("dist_transformer.data.sources.retries.READ_ATTEMPTS", 1):
            must_end_in_a_message("data", "inspect", str(corpus / "config.yaml"), "--rows", "1", text="")


@pytest.fixture(scope="module")
def written(corpus: Path) -> Path:
    """A run with checkpoints of steps 2 and 3, whose states say all that a resume reads of the data."""
    config = load_config(corpus / "config.yaml", [])
    data = open_run_data(config, corpus / "prepared", Manifest.load(corpus / "prepared"))
    run_dir = RunDir(corpus / "run")
    for step in (2, 3):
        save(run_dir, step, batches=step, skipped_updates=0, total_target_tokens=9, recipe=data.recipe(),
             position=data.start().to_json(), libraries=data.libraries, validation={"loss": 1.5})  # fmt: skip
    (run_dir.path / "config.yaml").write_text((corpus / "config.yaml").read_text("utf-8"), "utf-8")
    return run_dir.path


def resume(corpus: Path, run_dir: RunDir) -> Checkpoint | None:
    """All that a start of training reads of the checkpoints of a run."""
    checkpoint = checkpoints.newest_complete(run_dir, RUN_ID)
    assert checkpoint is not None
    data = open_run_data(
        load_config(corpus / "config.yaml", []), corpus / "prepared", Manifest.load(corpus / "prepared")
    )
    checkpoints.load(checkpoint, MemoryEngine(5))
    position = data.position_of(checkpoint)
    data.loader(position, checkpoint.state["batches"], 0, 1, 0).next_step()
    return checkpoint


def test_whole_checkpoints_are_resumed(corpus, written):
    found = resume(corpus, RunDir(written))
    assert found is not None
    assert found.step == 3


def sign(folder: Path) -> None:
    """Gives the manifest of a checkpoint the checksums of its files: damage that was done on purpose."""
    with contextlib.suppress(Exception):
        value = json.loads((folder / MANIFEST).read_text("utf-8"))
        value["files"] = {path.name: checkpoints.file_entry(path) for path in folder.glob("state*")}
        state = json.loads((folder / STATE).read_text("utf-8"))
        value |= {name: state[name] for name in ("version", "step", "run_id")}
        (folder / MANIFEST).write_text(json.dumps(value), encoding="utf-8")


@bounded(30)
@given(SEEDS, st.sampled_from([MANIFEST, STATE, STATE, "state_0.safetensors", "state_1.safetensors"]))
def test_a_damaged_checkpoint_is_never_resumed(corpus, written, seed, name):
    draw = random.Random(seed)
    run_dir = RunDir(copy_of(written, corpus / "copy"))
    file = run_dir.checkpoints / "step_00000003" / name
    before = file.read_bytes()
    if file.suffix == ".json" and draw.random() < 0.7:
        file.write_text(json.dumps(changed(json.loads(before), draw)), encoding="utf-8")
    else:
        file.write_bytes(damaged(before, draw))
    is_same = json.loads(before) == parsed(file) if name == MANIFEST else before == file.read_bytes()
    with ending():
        found = checkpoints.newest_complete(run_dir, RUN_ID)
    assert found is not None
    assert found.step == (3 if is_same else 2)


def parsed(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        return None


@bounded(30)
@given(SEEDS, st.sampled_from([STATE, STATE, STATE, "state_0.safetensors"]))
def test_a_checkpoint_that_was_changed_on_purpose_is_resumed_or_refused_with_a_message(corpus, written, seed, name):
    draw = random.Random(seed)
    run_dir = RunDir(copy_of(written, corpus / "copy"))
    file = run_dir.checkpoints / "step_00000003" / name
    content = file.read_bytes()
    if name == STATE:
        value = json.loads(content)
        for _ in range(draw.choice([1, 1, 2])):
            value = changed(value, draw)
        file.write_text(json.dumps(value), encoding="utf-8")
    else:
        file.write_bytes(damaged(content, draw))
    sign(file.parent)
    with ending(), contextlib.suppress(UserError):
        resume(corpus, run_dir)


@pytest.mark.parametrize("name", ["../../../outside", "/etc/passwd", "sub/file", "..", "", "\0"])
def test_a_manifest_that_names_files_outside_of_its_checkpoint_is_damage(corpus, written, name):
    run_dir = RunDir(copy_of(written, corpus / "copy"))
    newest = run_dir.checkpoints / "step_00000003"
    (corpus / "outside").write_bytes(b"x")
    value = json.loads((newest / MANIFEST).read_text("utf-8"))
    value["files"][name] = checkpoints.file_entry(corpus / "outside")
    (newest / MANIFEST).write_text(json.dumps(value), encoding="utf-8")
    found = checkpoints.newest_complete(run_dir, RUN_ID)
    assert found is not None
    assert found.step == 2
    assert (corpus / "outside").read_bytes() == b"x"


@bounded(6)
@given(SEEDS, st.sampled_from([STATE, MANIFEST]), st.booleans())
def test_verbs_that_look_at_changed_checkpoints_say_what_is_wrong(corpus, written, seed, name, is_signed):
    draw = random.Random(seed)
    run_dir = RunDir(copy_of(written, corpus / "copy"))
    file = run_dir.checkpoints / "step_00000003" / name
    file.write_text(json.dumps(changed(json.loads(file.read_bytes()), draw)), encoding="utf-8")
    if is_signed:
        sign(file.parent)
    run_dir.audit.write_text('{"event": "batch", "step": 1, "time": 1.0, "rows": {"0": [1]}, "batch_digest": "00"}\n')
    for verb in (("data", "audit"), ("data", "inspect"), ("average",)):
        must_end_in_a_message(*verb, str(run_dir.path))
