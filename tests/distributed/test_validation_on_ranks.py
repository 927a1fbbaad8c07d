"""Validation on real ranks: the scores of `evaluate` on any number of them and in any stage; early stops; the best."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Command, records
from safetensors.torch import load_file
from validation_program import launch

from dist_transformer.decoding.metrics import tokenised_scores
from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training import divergence
from dist_transformer.training.checkpoint import checkpoints

pytestmark = pytest.mark.slow

HELD = "data.more_validation={held: {demo: validation}}"
MEASURES = ("loss", "nll", "perplexity", "token_accuracy", "bleu", "chrf")


@pytest.fixture(scope="module")
def validated(train_small: Callable[..., Path]) -> Path:
    """A run whose model is that of its last validation, translated with a beam of 2."""
    return train_small(
        "validated",
        "data.more_validation={held: {source: train.en, target: train.de}, "
        "short: {source: valid.en, target: valid.de, languages: [en, zh]}}",
        "data.filters.rules.held_out=false",
        "validation={every_steps: 60, translate: true, beam_size: 2, max_sentences: 50}",
        "training={max_steps: 120, precision: fp32, log_every_steps: 20}",
        "data.max_tokens=1024",
        "decoding.max_tokens=400",
        "checkpoints={every_steps: 60, average_last: 1}",
    )


@pytest.fixture(scope="module")
def evaluated(command: Command, validated: Path) -> dict[str, Any]:
    """Scores and translations of `evaluate`, by corpus."""
    held = Path(command.folder) / "held"
    for side in ("en", "de"):
        lines = (command.folder / f"train.{side}").read_text(encoding="utf-8").splitlines(keepends=True)
        held.with_suffix(f".{side}").write_text("".join(lines[:50]), encoding="utf-8")
    said = command("evaluate", validated, "--split", "validation", "--beam", 2, "--tokenised", "moses")
    command("evaluate", validated, "--split", "short", "--beam", 2)
    command("evaluate", validated, "--source", f"{held}.en", "--target", f"{held}.de", "--beam", 2)
    found = {}
    for corpus, name in {"validation": "validation", "short": "short", "held": "held.en-*"}.items():
        (path,) = (validated / "evaluation").glob(f"{name}.translations")
        lines = path.read_text(encoding="utf-8").splitlines()
        found[corpus] = {**read_json(path.with_suffix(".json")), "translations": lines}
    found["validation"]["said"] = said
    return found


def test_a_run_records_the_scores_that_evaluate_finds_on_the_same_weights(validated, evaluated):
    steps = [record["step"] for record in records(validated, "validation")]
    assert steps == [60, 120]
    last = records(validated, "validation")[-1]
    assert 1 < last["chrf"] < 100
    assert 0 < last["token_accuracy"] < 1
    for corpus, prefix in (("validation", ""), ("held", "held/"), ("short", "short/")):
        for name in ("bleu", "chrf", "bleu_signature", "chrf_signature"):
            assert last[prefix + name] == evaluated[corpus][name], (corpus, name)
        assert f"|tok:{'zh' if corpus == 'short' else '13a'}|" in last[f"{prefix}bleu_signature"]
    for name in {*MEASURES} - {"bleu"}:  # the same text, prepared and not; words of the language of each corpus
        assert last[f"short/{name}"] == pytest.approx(last[name], rel=1e-6), name


def test_evaluate_counts_tokenised_bleu_too_when_asked(command, evaluated):
    references = (command.folder / "valid.de").read_text(encoding="utf-8").splitlines()
    expected = tokenised_scores(evaluated["validation"]["translations"], [references], "moses", "de")
    assert expected.items() <= evaluated["validation"].items()
    for name, key in (("tokenised", "bleu_tokenised"), ("compound-split", "bleu_compound_split")):
        assert f"{name} BLEU  {expected[key]:.2f}  {expected[f'{key}_signature']}\n" in evaluated["validation"]["said"]
    assert "bleu_tokenised" not in evaluated["short"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_stage_on_any_number_of_ranks_gives_the_same_translations_and_scores(
    command, validated, evaluated, num_ranks, tmp_path
):
    recorded = records(validated, "validation")[-1]
    found = launch(command, validated, num_ranks, tmp_path)
    assert len(found) == (9 if num_ranks == 2 else 4)
    for combination, result in found.items():
        assert not result["differs"], "between ranks"
        assert not result["random_state_moved"]
        assert result["is_training"]
        # A dry run before it, of at most two micro-batches and one batch of the search of each corpus, is not to be seen.
        assert 6 <= result["dry_run"] < min(result["progress"])  # each token of a search is progress too
        if combination.endswith("fp32"):
            for corpus, lines in result["translations"].items():
                translations = [lines[str(number + 1)] for number in range(len(lines))]
                assert translations == evaluated[corpus]["translations"], (combination, corpus)
            for prefix in ("", "held/", "short/"):
                for name in MEASURES:
                    assert result["values"][prefix + name] == pytest.approx(recorded[prefix + name], rel=1e-6)
        else:
            assert result["values"]["nll"] == pytest.approx(recorded["nll"], rel=0.02)
    if num_ranks == 2:  # the whole weights of stage 3 are those that others have in the module; autocast in bf16, too
        assert found["3 fp16"]["translations"] == found["1 fp16"]["translations"]
        assert found["3 bf16"]["translations"] == found["0 bf16"]["translations"]


def test_samples_are_half_the_same_sentences_at_each_validation_and_half_others(validated):
    shown: dict[str, list[Any]] = {"validation": [], "held": [], "short": []}
    source = (validated.parents[1] / "train.en").read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, (validated / "samples.jsonl").read_text(encoding="utf-8").splitlines()):
        assert record["event"] == "samples"
        sentences = record["sentences"]
        assert [s["fixed"] for s in sentences] == [True] * 3 + [False] * 3
        assert len({s["number"] for s in sentences}) == 6
        shown[record["corpus"]].append((record["step"], [s["number"] for s in sentences]))
        if record["corpus"] == "held":
            assert all(s["source"] == source[s["number"] - 1] for s in sentences)
            assert max(s["number"] for s in sentences) <= 50
    for of_corpus in shown.values():
        (first, numbers), (second, others) = of_corpus
        assert (first, second) == (60, 120)
        assert numbers[:3] == others[:3]
        assert numbers[3:] != others[3:]


def test_translating_changes_no_weight(train_small):
    given = ("validation.every_steps=2", "training.zero_stage=3", "model.dropout=0.3")
    without = train_small("not-translated", *given, "validation.translate=false", ranks=2)
    translated = train_small("translated", *given, "validation.translate=true", HELD, ranks=2)
    for path in sorted((without / "checkpoints").glob("step_*/state_*.safetensors")):
        other = load_file(translated / path.relative_to(without))
        assert all(tensor.equal(other[name]) for name, tensor in load_file(path).items())
    assert [r["loss"] for r in records(without)] == [r["loss"] for r in records(translated)]
    assert [r["loss"] for r in records(without, "validation")] == [r["loss"] for r in records(translated, "validation")]
    assert "bleu" not in records(without, "validation")[-1]


def test_a_run_that_went_on_in_bf16_translates_in_bf16_in_stage_3_too(train_small):
    given = ("training.precision=fp16", "training.zero_stage=3", "divergence.policy=switch_to_bf16")
    run = train_small("switched", *given, "training.max_steps=4", ranks=2)
    divergence.record(RunDir(run), divergence.Event(5, "diverged", "switch_to_bf16", 4, 1.0, 0.0))
    train_small("switched", *given, "validation={translate: true, max_sentences: 4}", ranks=2)
    assert [sorted({"bleu", "loss"} & {*found}) for found in records(run, "validation")] == [["loss"], ["bleu", "loss"]]


EARLY = (
    HELD,
    "validation={every_steps: 2, translate: true, max_sentences: 20, metric: held/chrf, patience: 3}",
    "checkpoints={every_steps: 2, keep_last: 1, average_last: 1, keep_best: 1, final_model: average_best}",
    "training.max_steps=200",
    "optimizer.learning_rate=0.03",
)


def test_a_run_ends_early_at_the_same_step_wherever_it_was_stopped_and_keeps_its_best(train_small):
    undisturbed = train_small("early", *EARLY)
    values = {r["step"]: r["held/chrf"] for r in records(undisturbed, "validation")}
    last = max(values)
    best = next(step for step in values if values[step] == max(values.values()))
    assert last == best + 6 < 200
    said = f"no better held/chrf than {values[best]:.4g} of step {best} in 3 validations"
    assert said in (undisturbed / "train.log").read_text(encoding="utf-8")
    assert read_json(undisturbed / "run.json")["state"] == "finished"
    kept = [checkpoints.step_of(path) for path in checkpoints.saved(RunDir(undisturbed))]
    assert {best, last} <= {*kept}
    assert read_json(undisturbed / "model" / "config.json")["step"] == best

    train_small("early-stopped", *EARLY, "training.max_hours=0.0001", code=75)  # at its first steps
    # At an end between two validations, which gets one of its own.
    train_small("early-stopped", *EARLY, f"training.max_steps={best + 3}")
    stopped = train_small("early-stopped", *EARLY)
    again = {r["step"]: r["held/chrf"] for r in records(stopped, "validation")}
    assert again == {**values, best + 3: again[best + 3]}

    before = [(stopped / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")]
    train_small("early-stopped", *EARLY)
    assert [(stopped / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")] == before
    train_small("early-stopped", *EARLY, "validation.patience=4")
    assert max(r["step"] for r in records(stopped)) > last
