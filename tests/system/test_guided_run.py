"""A run with guided alignment: the same on any ranks and over a stop, with one lexicon for all starts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from running import records

pytestmark = pytest.mark.slow


SETTINGS = ("training.guided_alignment=0.5", "model.dropout=0", "schedule.warmup_steps=3")


@pytest.fixture(scope="module")
def guided(train_small: Callable[..., Path]) -> Path:
    return train_small("guided", *SETTINGS)


def test_a_guided_run_is_the_same_over_a_stop_and_on_two_ranks_and_aligns_once(train_small, guided):
    plain = train_small("unguided", *SETTINGS[1:])
    train_small("guided-resumed", *SETTINGS, "training.max_steps=3")
    lexicon = guided.parent / "guided-resumed" / "lexicon.npz"
    before = lexicon.stat()
    resumed = train_small("guided-resumed", *SETTINGS, ranks=2)
    assert lexicon.stat().st_mtime_ns == before.st_mtime_ns
    assert lexicon.read_bytes() == (guided / "lexicon.npz").read_bytes()
    expected = [r["loss"] for r in records(guided)]
    assert [r["loss"] for r in records(resumed)] == pytest.approx(expected, rel=1e-5)
    assert records(guided)[0]["nll"] == pytest.approx(records(plain)[0]["nll"])
    assert records(guided)[0]["loss"] > records(plain)[0]["loss"] + 0.1


def test_a_start_after_one_that_ended_before_its_first_checkpoint_aligns_its_own_tokens(command, train_small, guided):
    (command.folder / "broken.py").write_text("def score(*_): return 0.0\n1 / 0\n", encoding="utf-8")
    broken = ("validation.translate=true", "validation.plugin=broken.py:score", "tokenizer.vocabulary_size=180")
    run = train_small("guided-broken", *SETTINGS, *broken, code=2)
    of_other_tokens = (run / "lexicon.npz").read_bytes()
    train_small("guided-broken", *SETTINGS)
    assert of_other_tokens != (run / "lexicon.npz").read_bytes() == (guided / "lexicon.npz").read_bytes()


def test_no_update_is_lost_where_a_lane_has_no_rows_left_in_an_epoch(train_small):
    trained = records(train_small("guided-epochs", "training.guided_alignment=0.5", "training.max_steps=40"))
    assert trained[-1]["epoch"] > 0
    assert {record["skipped_updates"] for record in trained} == {0}


def test_guided_alignment_learns_from_text_as_it_is_tokenized_and_modified_in_training(train_small, guided):
    settings: tuple[str, ...] = (*SETTINGS, "data.on_the_fly=true")
    read = train_small("guided-read", *settings)
    assert (read / "lexicon.npz").read_bytes() == (guided / "lexicon.npz").read_bytes()
    settings += ("data.modifiers={upper_case: 0.5, typos: 0.5}", "tokenizer.sampling=0.1")
    modified = train_small("guided-modified", *settings)
    assert (modified / "lexicon.npz").read_bytes() != (read / "lexicon.npz").read_bytes()
    train_small("guided-modified-resumed", *settings, "training.max_steps=3", ranks=2)
    resumed = train_small("guided-modified-resumed", *settings, ranks=2)
    assert (resumed / "lexicon.npz").read_bytes() == (modified / "lexicon.npz").read_bytes()
    assert [r["loss"] for r in records(resumed)] == pytest.approx([r["loss"] for r in records(modified)], rel=1e-5)
