"""Every mistake of a user ends in one clear message, exit code 2, no traceback, and nothing lost."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys

import pytest
from running import records, wait_for_step, with_constants

pytestmark = pytest.mark.slow


def refusal(command, *arguments: object, **keywords: str) -> str:
    said = command(*arguments, code=2, **keywords)
    assert "Traceback" not in said
    return said


def test_source_and_target_of_different_line_counts_are_refused_with_both(command, tmp_path):
    (tmp_path / "a").write_text("one\ntwo\nthree\n", encoding="utf-8")
    (tmp_path / "b").write_text("eins\nzwei\n", encoding="utf-8")
    said = refusal(command, "prepare", "small.yaml", f"data.train={{source: {tmp_path}/a, target: {tmp_path}/b}}")
    assert "3" in said
    assert "2" in said
    assert f"{tmp_path}/a" in said


def test_invalid_utf8_is_named_with_file_and_line(command, tmp_path):
    (tmp_path / "a").write_bytes(b"one\nt\xffo\n")
    (tmp_path / "b").write_text("eins\nzwei\n", encoding="utf-8")
    said = refusal(command, "prepare", "small.yaml", f"data.train={{source: {tmp_path}/a, target: {tmp_path}/b}}")
    assert f"{tmp_path}/a:2" in said
    assert "UTF-8" in said


def test_an_empty_corpus_is_refused(command, tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    said = refusal(command, "prepare", "small.yaml", f"data.train={{source: {tmp_path}/a, target: {tmp_path}/b}}")
    assert "empty" in said


def test_fewer_pairs_than_lanes_are_refused(command, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("one two three\n" * 3, encoding="utf-8")
    said = refusal(
        command, "train", "small.yaml", "run.name=few", "tokenizer={vocabulary_size: 16, type: unigram}",
        f"data.train={{source: {tmp_path}/a, target: {tmp_path}/b}}", "--ranks", 2,
    )  # fmt: skip
    assert said.count("3 pairs after filtering, fewer than data.lanes = 4") == 1  # by all ranks, and said once


def test_a_corpus_of_a_mixture_that_would_never_be_drawn_is_refused(command):
    corpora = "first: {source: train.en, target: train.de}, second: {source: valid.en, target: valid.de}"
    said = refusal(
        command, "train", "small.yaml", "run.name=undrawn", "data.train=null", "data.filters.rules.held_out=false",
        f"data.mixture={{corpora: {{{corpora}}}, weights: {{first: 1000000, second: 1}}}}",
    )  # fmt: skip
    assert "data.mixture.weights: no pair of second would ever be drawn" in said


@pytest.fixture(scope="module")
def trained(train_small):
    return train_small("trained")


def test_a_run_that_has_finished_stays_so_when_a_start_with_another_model_is_refused(command, trained):
    before, end = (trained / "run.json").read_bytes(), records(trained, "end", "history.jsonl")
    said = refusal(command, "train", "small.yaml", f"run.name={trained.name}", "model.d_ff=128")
    assert "model.d_ff: 64 -> 128" in said
    assert "another run.name" in said
    assert (trained / "run.json").read_bytes() == before
    assert records(trained, "end", "history.jsonl") == end
    refused = records(trained, "failed start", "history.jsonl")[-1]
    assert refused["step"] == 6
    assert "model.d_ff: 64 -> 128" in refused["reason"]
    assert f"failed: {refused['reason'][:20]}" in (trained / "train.log").read_text(encoding="utf-8")


def test_a_run_that_has_finished_and_crashes_at_a_longer_start_has_failed(command, train_small):
    run = train_small("crashed")
    broken = with_constants({"training.trainer.dry_run": None})
    said = command("train", "small.yaml", "run.name=crashed", "training.max_steps=9", code=1, **broken)
    assert "'NoneType' object is not callable" in said
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["state"] == "failed"


def test_changed_data_is_refused(command, trained, small_corpus, tmp_path):
    for name in ("train.en", "train.de"):
        lines = (small_corpus / name).read_text(encoding="utf-8").splitlines()[:500]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    corpus = f"data.train={{source: {tmp_path}/train.en, target: {tmp_path}/train.de}}"
    prepared = sorted((trained.parent / "prepared").iterdir())
    said = refusal(command, "train", "small.yaml", f"run.name={trained.name}", corpus, "training.max_steps=9")
    assert "data.train.files: 2 changed (train.de, train.en)" in said
    assert sorted((trained.parent / "prepared").iterdir()) == prepared


def test_a_finished_run_started_again_says_so_and_changes_nothing(command, trained):
    before = (trained / "metrics.jsonl").read_bytes()
    said = command("train", "small.yaml", f"run.name={trained.name}")
    assert "finished at step 6" in said
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_goes_on(command, train_small, trained):
    run = trained.with_name("damaged")
    shutil.copytree(trained, run)
    file = run / "checkpoints" / "step_00000006" / "state_0.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    said = command("train", "small.yaml", "run.name=damaged")
    assert "step_00000006 is damaged (state_0.safetensors: SHA-256 differs" in said
    assert "resumed from" in said
    assert [r["step"] for r in records(run)] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in records(run)] == [r["loss"] for r in records(trained)]


def test_a_damaged_older_checkpoint_is_left_out_of_the_average(command, trained):
    run = trained.with_name("damaged-older")
    shutil.copytree(trained, run)
    file = run / "checkpoints" / "step_00000003" / "state.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"step": 3', '"step": 4'), encoding="utf-8")
    said = command("train", "small.yaml", "run.name=damaged-older")
    assert "step_00000003 is damaged" in said
    assert "model: average of step_00000006\n" in said


SLOW = """
import time, torch

class build(torch.nn.Module):
    def __init__(self, config, source_vocabulary, target_vocabulary, pad_id):
        super().__init__()
        self.logits = torch.nn.Embedding(target_vocabulary, target_vocabulary)

    def forward(self, source, target):
        time.sleep(0.1)
        return self.logits(target)
"""


def test_a_second_job_on_a_run_folder_is_refused_and_leaves_the_first_alone(command):
    (command.folder / "slow.py").write_text(SLOW, encoding="utf-8")  # the second one waits for some seconds
    training = ("train", "small.yaml", "run.name=twice", "model.plugin=slow.py:build", "training.max_steps=100000")
    first = command.start(*training)
    run = command.folder / "runs" / "twice"
    wait_for_step(run, 2)
    said = command(*training, code=2)
    assert "Traceback" not in said
    assert f"a process with pid {first.pid} on {platform.node()} works on this run folder" in said
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["state"] == "running"
    first.terminate()
    first.communicate(timeout=240)
    assert first.returncode == 75


def test_a_run_folder_cannot_be_renamed_by_an_override(command, trained):
    assert "keeps its name" in refusal(command, "train", trained, "run.name=other")


def test_a_run_that_diverged_ends_with_advice(command):
    said = refusal(command, "train", "small.yaml", "run.name=diverged", "optimizer.learning_rate=1e30",
                   "training.max_steps=100000")  # fmt: skip
    assert "training diverged at step" in said
    assert "the loss was not finite for 20 steps in a row" in said
    assert "lower optimizer.learning_rate" in said


def test_a_damaged_shard_ends_all_ranks_with_its_name(command, small_corpus):
    prepared = small_corpus / "prepared-damaged"
    arguments = ("small.yaml", "run.name=shard", f"data.prepared={prepared}")
    command("prepare", *arguments)
    shard = prepared / "shards" / "train-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[40:4000] = bytes(3960)
    shard.write_bytes(content)
    said = refusal(command, "train", *arguments, "data.loader_workers=1", "--ranks", 2)
    assert f"{shard}: row group" in said
    assert "run `dist-transformer prepare` again" in said


def test_a_tokenizer_of_another_vocabulary_is_refused(command, trained, small_corpus):
    other = trained.with_name("other-tokenizer")
    shutil.copytree(trained, other)
    command("prepare", "small.yaml", "tokenizer.vocabulary_size=240", f"data.prepared={small_corpus}/prepared-240")
    shutil.copy(small_corpus / "prepared-240" / "tokenizer" / "source.model", other / "model" / "source.model")
    said = refusal(command, "translate", other, text="twenty-one\n")
    assert "its tokenizer has 240 source and 240 target pieces, its model 200 and 200" in said


def test_a_folder_without_a_model_says_how_to_make_one(command, tmp_path):
    said = refusal(command, "translate", tmp_path, text="twenty-one\n")
    assert "holds no model" in said
    assert "dist-transformer average RUN_FOLDER" in said
    (tmp_path / "config.yaml").write_text("data: {train: {demo: train}}\n")  # of a run that has not ended
    said = refusal(command, "translate", tmp_path, text="twenty-one\n")
    assert f"before that: dist-transformer average {tmp_path}" in said


def test_of_a_checkpoint_a_model_is_made_as_the_message_says(command, trained, tmp_path):
    [*_, checkpoint] = sorted((trained / "checkpoints").glob("step_*"))
    step = int(checkpoint.name.removeprefix("step_"))
    for path in (checkpoint, trained / "checkpoints" / f"step_{step}"):  # as it is, and as it is said
        said = refusal(command, "translate", path, text="twenty-one\n")
        assert f"a model is made of it by: dist-transformer average {trained} --step {step} --output FOLDER" in said
    made = command("average", trained, "--step", step, "--output", tmp_path / "model")
    assert f"{tmp_path / 'model'}: average of {checkpoint.name}" in made
    assert command("translate", tmp_path / "model", text="twenty-one\n").count("\n") == 1


def test_input_that_is_not_utf8_is_named_with_its_line(trained):
    arguments = [sys.executable, "-m", "dist_transformer", "translate", trained]
    done = subprocess.run(arguments, input=b"fine\n\xff\n", capture_output=True, check=False)
    assert done.returncode == 2
    assert b"standard input, line 2: not valid UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


def test_an_mlflow_address_that_answers_nothing_stops_nothing(command, train_small):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections and never says a word
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracking = f"tracking={{enabled: true, uri: '{uri}'}}"
        run = train_small("silent-mlflow", tracking)
    assert [r["step"] for r in records(run)] == [1, 2, 3, 4, 5, 6]
    assert (run / "model" / "model.safetensors").is_file()


@pytest.fixture
def small_disk(command):
    """A disk of 2.4 MB under the runs folder."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = command.folder / "runs" / "full"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2400k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # what still ends may hold it


def test_on_a_full_disk_training_goes_on_until_the_last_checkpoint_and_after_more_space_from_the_older_one(
    command, small_disk, trained
):
    arguments = ("train", "small.yaml", "run.name=full", "checkpoints.every_steps=1")
    said = command(*arguments, code=1)
    assert "Traceback" not in said
    assert "checkpoint of step 6 was given up: needs 1." in said
    saved = sorted(p.name for p in (small_disk / "checkpoints").glob("step_????????"))
    assert saved
    assert f"the run can resume from {saved[-1]}" in said
    assert "training continues, and tries again at the next one" in (small_disk / "train.log").read_text(
        encoding="utf-8"
    )
    assert [r["step"] for r in records(small_disk)] == [1, 2, 3, 4, 5, 6]
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    command(*arguments)
    assert [r["loss"] for r in records(small_disk)] == [r["loss"] for r in records(trained)]


@pytest.mark.parametrize("verb", [("track", "sync"), ("track", "model"), ("ui",)])
def test_a_folder_that_is_not_there_is_named_and_not_made(command, small_corpus, verb):
    said = refusal(command, *verb, "runs/nowhere")
    assert "runs/nowhere: no such folder; expected" in said
    assert not (small_corpus / "runs" / "nowhere").exists()


def test_a_model_folder_that_is_not_there_is_named(command, trained):
    assert "nomodel: no such folder; expected a model folder" in refusal(command, "track", "model", trained, "nomodel")
