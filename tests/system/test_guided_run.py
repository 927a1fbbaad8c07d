"""A run with guided alignment: the same on any ranks and over a stop, with one lexicon for all starts."""

import pytest
from running import records

pytestmark = pytest.mark.slow


def test_a_guided_run_is_the_same_on_two_ranks_and_over_a_stop_and_aligns_once(train_small):
    settings = ("training.guided_alignment=0.5", "model.dropout=0", "schedule.warmup_steps=3")
    whole, plain = train_small("guided", *settings), train_small("unguided", *settings[1:])
    train_small("guided-resumed", *settings, "training.max_steps=3")
    lexicon = whole.parent / "guided-resumed" / "lexicon.npz"
    before = lexicon.stat()
    resumed = train_small("guided-resumed", *settings)
    assert lexicon.stat().st_mtime_ns == before.st_mtime_ns
    assert lexicon.read_bytes() == (whole / "lexicon.npz").read_bytes()
    assert [r["loss"] for r in records(resumed)] == [r["loss"] for r in records(whole)]
    on_two = train_small("guided-on-two", *settings, ranks=2)
    assert [r["loss"] for r in records(on_two)] == pytest.approx([r["loss"] for r in records(whole)], rel=1e-5)
    assert records(whole)[0]["nll"] == pytest.approx(records(plain)[0]["nll"])
    assert records(whole)[0]["loss"] > records(plain)[0]["loss"] + 0.1


def test_a_start_after_one_that_ended_before_its_first_checkpoint_aligns_its_own_tokens(command, train_small):
    (command.folder / "broken.py").write_text("def score(*_): return 0.0\n1 / 0\n", encoding="utf-8")
    broken = ("validation.translate=true", "validation.plugin=broken.py:score", "tokenizer.vocabulary_size=180")
    settings = ("training.guided_alignment=0.5", "model.dropout=0", "schedule.warmup_steps=3")
    run = train_small("guided-broken", *settings, *broken, code=2)
    of_other_tokens = (run / "lexicon.npz").read_bytes()
    train_small("guided-broken", *settings)
    whole = train_small("guided", *settings)
    assert of_other_tokens != (run / "lexicon.npz").read_bytes() == (whole / "lexicon.npz").read_bytes()


def test_no_update_is_lost_where_a_lane_has_no_rows_left_in_an_epoch(train_small):
    trained = records(train_small("guided-epochs", "training.guided_alignment=0.5", "training.max_steps=40"))
    assert trained[-1]["epoch"] > 0
    assert {record["skipped_updates"] for record in trained} == {0}


def test_guided_alignment_learns_from_text_as_it_is_tokenized_and_modified_in_training(train_small):
    settings = ("training.guided_alignment=0.5", "model.dropout=0", "schedule.warmup_steps=3", "data.on_the_fly=true")
    prepared, read = train_small("guided", *settings[:3]), train_small("guided-read", *settings)
    assert (read / "lexicon.npz").read_bytes() == (prepared / "lexicon.npz").read_bytes()
    settings += ("data.modifiers={upper_case: 0.5, typos: 0.5}", "tokenizer.sampling=0.1")
    modified = train_small("guided-modified", *settings)
    assert (modified / "lexicon.npz").read_bytes() != (read / "lexicon.npz").read_bytes()
    train_small("guided-modified-resumed", *settings, "training.max_steps=3", ranks=2)
    resumed = train_small("guided-modified-resumed", *settings, ranks=2)
    assert (resumed / "lexicon.npz").read_bytes() == (modified / "lexicon.npz").read_bytes()
    assert [r["loss"] for r in records(resumed)] == pytest.approx([r["loss"] for r in records(modified)], rel=1e-5)


def test_what_guided_alignment_cannot_do_is_refused(command):
    settings = ("training.guided_alignment=0.5", "training.compile_layers=true")
    said = command("config", "check", "small.yaml", *settings, code=2)
    assert "it needs training.compile_layers: false" in said
