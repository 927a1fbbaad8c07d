"""`data inspect` shows the batches that training trained on: by digest, row ids, text, and on to where the run ends."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Command, records
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.data.loader.window_request import CORPUS_SHIFT
from dist_transformer.errors import CheckpointError, UserError

pytestmark = pytest.mark.slow

AUDIT = "data.audit=true"
MIXTURE = (
    "data.train=null",
    "data.filters.rules.held_out=false",
    "data.mixture={corpora: {first: {source: train.en, target: train.de}, second: {source: valid.en, target: valid.de}}, "
    "weights: {first: 3, second: 1}, schedule: [{from_step: 5, weights: {first: 1, second: 3}}]}",
)


def inspect(run: Path, *arguments: object) -> str:
    """What the command prints of a run folder or a YAML file; raises what the command would tell."""
    result = CliRunner().invoke(app, ["data", "inspect", str(run), *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def digest(said: str) -> str:
    (found,) = re.findall(r"^batch digest  ([0-9a-f]{16})$", said, re.MULTILINE)
    return found


def row_names(said: str) -> list[str]:
    return re.findall(r"^lane \d+, row \d+: (\w+:\d+),", said, re.MULTILINE)


def digests(run: Path) -> dict[int, str]:
    return {record["step"]: record["batch_digest"] for record in records(run)}


def audited(run: Path, step: int, lane: int) -> list[int]:
    (record,) = [r for r in records(run, "batch", "audit.jsonl") if r["step"] == step]
    return record["rows"][str(lane)]


@pytest.fixture(scope="module")
def yaml(small_corpus: Path) -> Path:
    return small_corpus / "small.yaml"


@pytest.fixture(scope="module")
def trained(train_small: Callable[..., Path]) -> Path:
    """Six steps and, after a resume on other ranks, six more: checkpoints of steps 6, 9 and 12 are left."""
    train_small("inspected", AUDIT, ranks=2)
    return train_small("inspected", AUDIT, "training.max_steps=12")


@pytest.fixture(scope="module")
def mixed(train_small: Callable[..., Path]) -> Path:
    return train_small("inspected-mixture", AUDIT, *MIXTURE, "training.max_steps=8", ranks=2)


@pytest.mark.parametrize("step", [1, 3, 6, 7, 10, 12])
def test_a_step_of_a_run_has_the_digest_and_the_rows_that_were_trained_on(trained, yaml, step):
    for lane in range(4):
        said = inspect(trained, "--step", step, "--lane", lane, "--rows", 1000)
        assert digest(said) == digests(trained)[step]
        assert row_names(said) == [f"train:{row}" for row in audited(trained, step, lane)]
    assert digest(inspect(yaml, "training.max_steps=12", "--step", step)) == digests(trained)[step]


def test_the_way_begins_at_the_newest_checkpoint_before_the_step(trained):
    assert "step 12 of epoch 0, found from checkpoint step_00000009\n" in inspect(trained, "--step", 12)
    assert "found from checkpoint step_00000006\n" in inspect(trained, "--step", 9)
    assert "found from the first step\n" in inspect(trained, "--step", 6)


def test_without_a_step_it_is_the_first_or_the_one_after_the_newest_checkpoint(trained, yaml, train_small):
    assert digest(inspect(yaml)) == digests(trained)[1]
    said = inspect(trained, "training.max_steps=13")
    run = train_small("inspected-further", AUDIT, "training.max_steps=13")
    assert digest(said) == digests(run)[13]


def test_steps_of_later_epochs_and_of_a_run_with_a_schedule_of_weights_are_found(mixed, train_small):
    long = ("training.max_steps=null", "training.max_epochs=2", "training.log_every_steps=1")
    epochs = train_small("inspected-epochs", *long)
    first_of_second = next(r["step"] for r in records(epochs) if r["epoch"] == 1)
    for step in (first_of_second - 1, first_of_second, max(digests(epochs))):
        assert digest(inspect(epochs, *long, "--step", step)) == digests(epochs)[step]
    for step in (1, 4, 5, 7, 8):
        said = inspect(mixed, "--step", step, "--lane", 2, "--rows", 1000)
        assert digest(said) == digests(mixed)[step]
        numbers = [
            (["first", "second"][row >> CORPUS_SHIFT], row % (1 << CORPUS_SHIFT)) for row in audited(mixed, step, 2)
        ]
        assert row_names(said) == [f"{name}:{row}" for name, row in numbers]
        record = next(r for r in records(mixed) if r["step"] == step)
        assert f"pairs: first {record['pairs/first']}, second {record['pairs/second']}\n" in said


def test_sizes_by_lane_add_up_to_those_of_the_training_record(trained):
    said = inspect(trained, "--step", 5, "--rows", 0)
    header, *rows = [line.split() for line in said.splitlines()[1:6]]
    assert header[:8] == ["lane", "rows", "source", "target", "pairs", "real", "padded", "padding"]
    sizes = [list(map(int, row[:7])) for row in rows]
    assert [row[0] for row in sizes] == [0, 1, 2, 3]
    assert all(rows_ * (source + target) == padded for _, rows_, source, target, _, _, padded in sizes)
    record = next(r for r in records(trained) if r["step"] == 5)
    real, padded = sum(row[5] for row in sizes), sum(row[6] for row in sizes)
    assert 1 - real / padded == pytest.approx(record["padding_share"])
    assert max(row[6] for row in sizes) / (padded / 4) == pytest.approx(record["straggler_ratio"])
    assert f"tokens        {record['target_tokens']} target; {real} real of {padded} padded" in said
    assert f"straggler ratio {record['straggler_ratio']:.3f}" in said


def test_rows_are_shown_as_the_lines_of_the_corpus_and_as_their_pieces(trained, small_corpus):
    said = inspect(trained, "--step", 2, "--lane", 1, "--rows", 5)
    rows = re.findall(
        r"^lane 1, row \d: train:(\d+), (\d+) source and (\d+) target tokens\n  source  (.*)\n +(.*)\n  target  (.*)\n +(.*)$",
        said, re.MULTILINE,
    )  # fmt: skip
    assert len(rows) == 5
    lines = {side: (small_corpus / f"train.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")}
    for number, *counts, source, source_pieces, target, target_pieces in rows:
        assert (source, target) == (lines["en"][int(number)], lines["de"][int(number)])
        for text, count, pieces in zip((source, target), counts, (source_pieces, target_pieces), strict=True):
            assert len(pieces.split(" ")) == int(count)
            assert pieces.endswith(" </s>")
            assert pieces.removesuffix(" </s>").replace(" ", "").replace("▁", " ").strip() == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--step", 0], "--step 0: steps count from 1"),
        (["--step", -3], "--step -3: steps count from 1"),
        (["--step", 13], "the run ends after step 12, by training.max_steps = 12. Give --step 12 or a smaller one"),
        ([], "the run ends after step 12, by training.max_steps = 12"),
        (["--step", 500, "training.max_steps=null", "training.max_epochs=1"], r"step \d\d, by training.max_epochs = 1\."),
        (["--lane", 4], "--lane 4: data.lanes is 4, so lanes are 0 to 3"),
        (["data.window_rows=50", "--step", 12], "data.window_rows: 60 -> 50"),
    ],
)  # fmt: skip
def test_a_step_or_lane_that_the_run_does_not_have_is_a_message(trained, arguments, expected):
    with pytest.raises(UserError, match=expected):
        inspect(trained, "training.max_steps=12", *arguments)


def test_the_command_tells_a_mistake_in_one_message(command: Command, trained):
    said = command("data", "inspect", trained, "--step", 99, code=2)
    assert said.count("dist-transformer: ") == 1
    assert "Traceback" not in said


def test_a_checkpoint_whose_state_cannot_be_read_is_passed_over_and_left_as_it_is(train_small):
    run = train_small("inspected-damaged")
    state = run / "checkpoints/step_00000006/state.json"
    state.write_text("{", encoding="utf-8")
    before = sorted(run.rglob("*"))
    said = inspect(run, "--step", 6)
    assert digest(said) == digests(run)[6]
    assert "found from checkpoint step_00000003" in said
    assert sorted(run.rglob("*")) == before


def test_a_run_that_was_cut_into_other_lanes_shows_each_step_with_the_lanes_it_had(train_small):
    train_small("inspected-lanes")
    run = train_small("inspected-lanes", "data.lanes=3", "data.reslice_from=4", "training.max_steps=12", ranks=2)
    for step in (8, 11):
        assert digest(inspect(run, "--step", step)) == digests(run)[step]
    with pytest.raises(
        CheckpointError, match=r"trained with 4 lanes, as step_00000006 .*data.lanes=4 data.reslice_from=null"
    ):
        inspect(run, "--step", 5)
    assert digest(inspect(run, "data.lanes=4", "data.reslice_from=null", "--step", 5)) == digests(run)[5]
    shutil.rmtree(run / "checkpoints/step_00000006")
    with pytest.raises(
        CheckpointError, match="cut from 4 into 3 lanes, and the checkpoint where that happened is not kept"
    ):
        inspect(run, "--step", 8)
