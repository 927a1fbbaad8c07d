"""Mixtures, weights that change, tokenization on the fly and other lanes: the same batches on any ranks, through stops."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from running import Command, records

from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import Config
from dist_transformer.data.loader.window_request import CORPUS_SHIFT
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import CheckpointError, DataError
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint.checkpoints import Checkpoint, newest_complete
from dist_transformer.training.run_data import RunData, open_run_data

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 14
CORPORA = "big: {source: train.en, target: train.de}, small: {source: valid.en, target: valid.de, tags: [<small>]}"
MIXTURE = (
    "data.train=null",
    f"data.mixture={{corpora: {{{CORPORA}}}, weights: {{big: 3, small: 1}}, "
    "schedule: [{from_step: 6, weights: {big: 1, small: 1}}]}",
    "data.filters.rules.held_out=false",
    "data.window_rows=40",
    f"training.max_steps={STEPS}",
    "data.audit=true",
    "schedule.warmup_steps=1",
)
ON_THE_FLY = (
    "data.on_the_fly=true",
    "tokenizer.sampling=0.2",
    "data.modifiers={upper_case: 0.2, no_final_punctuation: 0.2, tags: 0.2, typos: 0.2, noise: 0.1}",
    "data.loader_workers=1",
    f"training.max_steps={STEPS}",
    "data.audit=true",
    "schedule.warmup_steps=1",
)


def batches(run: Path) -> list[tuple[int, str, dict]]:
    return [(r["step"], r["batch_digest"], r["rows"]) for r in records(run, "batch", "audit.jsonl")]


def losses(run: Path) -> list[float]:
    return [r["loss"] for r in records(run)]


@pytest.fixture(scope="module")
def mixed(train_small: Callable[..., Path]) -> Path:
    return train_small("mixed", *MIXTURE)


def state_of(run: Path, step: int) -> dict:
    return json.loads((run / "checkpoints" / f"step_{step:08d}" / "state.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sampled(train_small: Callable[..., Path]) -> Path:
    return train_small("sampled", *ON_THE_FLY)


def test_a_mixture_goes_through_each_corpus_evenly_and_counts_it_in_the_metrics(mixed):
    used = Counter(row for _, _, rows in batches(mixed) for ids in rows.values() for row in ids)
    for corpus, name in enumerate(("big", "small")):
        counts = {row: count for row, count in used.items() if row >> CORPUS_SHIFT == corpus}
        assert name == "big" or len(counts) == 40
        # At equal weights a window takes two passes over the small corpus.
        assert max(counts.values()) - min(counts.values()) <= 3
        assert sum(counts.values()) == sum(r[f"pairs/{name}"] for r in records(mixed))


def test_the_audit_of_a_run_counts_the_passes_over_each_corpus(mixed, command):
    said = command("data", "audit", mixed)
    assert "whole run, small: 40 of 40 rows" in said
    assert f"{STEPS} batches up to step_{STEPS:08d}: every row as often as was due, none lost, none repeated" in said


def test_the_weights_of_a_mixture_change_within_a_window_of_their_step(mixed):
    shares = [r["pairs/small"] / (r["pairs/small"] + r["pairs/big"]) for r in records(mixed)]
    assert sum(shares[:5]) / 5 == pytest.approx(0.25, abs=0.1)
    assert sum(shares[9:]) / len(shares[9:]) == pytest.approx(0.5, abs=0.1)


def test_losses_are_forgotten_until_the_last_lane_has_the_new_weights(train_small):
    """Else those of the old text would be the measure of the new one, which came as a divergence."""

    def is_fading(step: int) -> bool:
        position = state_of(run, step)["position"]
        return any(
            window < len(position["open"].get(str(lane), [])) for lane, (window, _) in enumerate(position["lanes"])
        )

    settings = (*MIXTURE, "data.window_rows=100", "checkpoints.every_steps=1", "checkpoints.keep_last=99")
    for stop, ranks in ((7, 2), (STEPS, 1)):
        run = train_small("faded", *settings, f"training.max_steps={stop}", ranks=ranks)
    fading, end = [step for step in range(1, STEPS + 1) if is_fading(step)], state_of(run, STEPS)
    assert fading[0] == 6
    assert 7 < fading[-1] < STEPS - 1
    assert end["loss_monitor"]["count"] == STEPS - len(end["losses_to_judge"]) - fading[-1] + 1


def test_a_mixture_with_changing_weights_is_the_same_on_other_ranks_with_stops_around_the_change(mixed, train_small):
    for stop, ranks in ((5, 2), (6, 3), (9, 1), (STEPS, 4)):
        steps = f"training.max_steps={stop}"
        run = train_small("mixed-stopped", *MIXTURE, steps, "data.loader_workers=1", ranks=ranks)
    assert batches(run) == batches(mixed)
    assert losses(run) == pytest.approx(losses(mixed), rel=1e-3)
    assert len({state_of(each, STEPS)["loss_monitor"]["count"] for each in (run, mixed)}) == 1


def test_the_shipped_curriculum_over_modified_and_sampled_text_is_the_same_on_other_ranks_with_stops_around_its_stage(
    train_small,
):
    data = yaml.safe_load((REPOSITORY / "configs" / "robust.yaml").read_text(encoding="utf-8"))["data"]
    corpora = {
        name: {"source": f"{text}.en", "target": f"{text}.de"} for name, text in (("opus", "valid"), ("wmt", "train"))
    }
    settings = (
        "data.train=null", "data.mixture=" + json.dumps({**data["mixture"], "corpora": corpora}),
        "data.modifiers=" + json.dumps(data["modifiers"]), "data.filters.rules.held_out=false",
        *ON_THE_FLY[:2], *ON_THE_FLY[3:],
    )  # fmt: skip
    whole = train_small("curriculum", *settings)
    used = Counter(row for _, _, rows in batches(whole) for ids in rows.values() for row in ids)
    assert [used[row] for row in range(40)] == [2] * 40  # of opus, which comes first
    assert sum(used.values()) > sum(r["pairs/opus"] for r in records(whole)) == 80
    begins = next(r["step"] for r in records(whole) if r["epoch"] == 1)
    assert all((r["pairs/opus"] > 0) == (r["step"] < begins) for r in records(whole))
    for stop, ranks in ((begins - 1, 2), (begins, 3), (STEPS, 4)):
        run = train_small("curriculum-stopped", *settings, f"training.max_steps={stop}", ranks=ranks)
    assert batches(run) == batches(whole)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-3)


def test_weights_of_steps_that_are_trained_may_not_be_changed_but_later_ones_may(train_small, command):
    run = train_small("reweighted", *MIXTURE, "training.max_steps=3")
    said = command("train", run, "data.mixture.weights={big: 1, small: 1}", "--ranks", 2, code=2)
    assert said.count("0.75 : 0.25 then, 0.5 : 0.5 now") == 1  # by both ranks, and said once
    assert "data.mixture.schedule from step 4 on" in said
    undrawn = "data.mixture.schedule=[{from_step: 4, weights: {big: 1, small: 1.0e-9}}]"
    said = command("train", run, undrawn, "training.max_steps=9", "--ranks", 2, code=2)
    assert said.count("data.mixture.schedule.0.weights: no pair of small would ever be drawn") == 1
    command("train", run, "data.mixture.schedule=[{from_step: 4, weights: {big: 0, small: 1}}]", "training.max_steps=9")
    assert records(run)[-1]["pairs/big"] == 0


def test_a_stage_that_draws_nothing_of_a_corpus_is_refused_where_it_is_new_and_a_run_that_has_it_resumes(mixed):
    """As a run of an earlier version may have, which was given it at a resume."""
    data, checkpoint = data_and_checkpoint(mixed)
    settings = data.config.model_dump(mode="json")
    settings["data"]["mixture"]["schedule"] += [{"from_step": 99, "weights": {"big": 1, "small": 1e-9}}]
    data = replace(data, config=Config.model_validate(settings))
    with pytest.raises(DataError, match=r"data\.mixture\.schedule\.1\.weights: no pair of small would ever be drawn"):
        data.position_of(checkpoint)
    checkpoint.state["settings"] = data.config.model_dump(mode="json")
    expected = data.position_of(checkpoint)
    del checkpoint.state["settings"]
    assert data.position_of(checkpoint) == expected


def test_sampling_and_modifiers_give_other_pieces_than_none_and_a_resume_refuses_others(sampled, command):
    without = [(*ON_THE_FLY, "tokenizer.sampling=0.0"), (*ON_THE_FLY[:2], *ON_THE_FLY[3:])]
    for given, is_same in ((ON_THE_FLY, True), *((settings, False) for settings in without)):
        said = command("data", "inspect", "small.yaml", *given, "--step", 1)
        assert (f"batch digest  {records(sampled)[0]['batch_digest']}\n" in said) is is_same
        assert (f"tokens        {records(sampled)[0]['target_tokens']} target; " in said) is is_same
    said = command("train", sampled, "data.modifiers.typos=0.5", f"training.max_steps={STEPS + 1}", code=2)
    assert "modifiers.typos: 0.2 in the folder, 0.5 now" in said


def data_and_checkpoint(run: Path) -> tuple[RunData, Checkpoint]:
    config = load_config(run / "config.yaml", check_files=False)
    folder = Path(str(config.data.prepared))
    checkpoint = newest_complete(RunDir(run), None)
    assert checkpoint is not None
    return open_run_data(config, folder, Manifest.load(folder)), checkpoint


@pytest.mark.parametrize("fixture", ["mixed", "sampled"])
def test_a_library_that_draws_other_rows_than_the_run_was_trained_with_is_refused(fixture, request, monkeypatch):
    data, checkpoint = data_and_checkpoint(request.getfixturevalue(fixture))
    assert data.position_of(checkpoint) == data.position_of(checkpoint)
    assert set(data.libraries) == {"numpy"} | ({"sentencepiece"} if fixture == "sampled" else set())
    trained_with = checkpoint.state["libraries"]["numpy"]
    trained_with["version"] = "2.0.1"
    monkeypatch.setattr(np.random, "PCG64", np.random.MT19937)  # another stream from the same seed
    data, _ = data_and_checkpoint(request.getfixturevalue(fixture))
    with pytest.raises(
        CheckpointError, match=rf"twice or never.* numpy {np.__version__}, not 2\.0\.1 .*install numpy==2\.0\.1, or"
    ):
        data.position_of(checkpoint)


def test_a_library_that_cuts_text_otherwise_is_refused_where_text_is_cut_in_training(sampled, monkeypatch):
    data, checkpoint = data_and_checkpoint(sampled)
    encode = Tokenizer.encode_source
    monkeypatch.setattr(
        Tokenizer, "encode_source", lambda *given, **settings: [ids[1:] for ids in encode(*given, **settings)]
    )
    checkpoint.state["libraries"]["sentencepiece"]["version"] = "0.1.99"
    with pytest.raises(
        CheckpointError, match=r"sentencepiece \S+, not 0\.1\.99 .*pip install sentencepiece==0\.1\.99, or"
    ):
        data.position_of(checkpoint)


def test_a_checkpoint_from_before_libraries_were_written_down_is_gone_on_with(mixed):
    data, checkpoint = data_and_checkpoint(mixed)
    del checkpoint.state["libraries"]
    assert data.position_of(checkpoint).partition.epoch >= 0


def test_going_on_with_other_lanes_still_uses_every_row_of_the_epoch_once(train_small, command):
    name, num_lanes, ranks = "lanes-6", 6, 3
    one_epoch = ("data.audit=true", "training.max_epochs=1", "training.max_steps=4")
    run = train_small(name, *one_epoch, "data.window_rows=40", ranks=2)
    other = (f"data.lanes={num_lanes}", "training.max_steps=null", "--ranks", ranks)
    said = command("train", run, *other, code=2)
    assert f"data.lanes: 4 -> {num_lanes}" in said
    assert "data.reslice_from=4" in said
    command("train", run, "data.reslice_from=4", "training.max_steps=5", *other[:1], "--ranks", 1)
    assert "every row as often as was due" in command("data", "audit", run)
    command("train", run, *other)  # run folder and checkpoint now have the new lanes
    used = Counter(row for _, _, rows in batches(run) for ids in rows.values() for row in ids)
    assert sorted(used) == list(range(600))
    assert set(used.values()) == {1}
    assert {len(rows) for _, _, rows in batches(run)} >= {4, num_lanes}
    assert "epoch 0, train: 600 of 600 rows, each once" in command("data", "audit", run)


def test_another_seed_filter_or_tokenizer_is_refused_with_what_was_and_what_is(train_small, command: Command):
    run = train_small("changed", "training.max_steps=2", "schedule.warmup_steps=1")
    said = command("train", run, "run.seed=4", "data.prepared=null", code=2)
    assert "seed: 3 in the folder, 4 now" in said
    said = command("train", run, "data.prepared=null", "data.filters.max_tokens=50", code=2)
    assert "filters.max_tokens: 96 in the folder, 50 now" in said
    said = command("train", run, "data.prepared=null", "tokenizer.vocabulary_size=208", code=2)
    assert "tokenizer.vocabulary_size: " in said
    assert "in the folder, 208 now" in said
