"""Measures of a validation corpus against plain torch, the whole weights of an engine, which sentences are shown."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_torch import micro_batches_of, ragged_batches

from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.data.loader.window import BatchShape
from dist_transformer.training.validation import translation
from dist_transformer.training.validation.runner import ValidationSet, measure_tokens, sample_lines


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_measures_are_those_of_all_logits_at_once(make_engine, ranks, stage):
    engine, batches, calls = make_engine(zero_stage=stage, dropout=0.5), micro_batches_of(ragged_batches(5)), []
    found = measure_tokens(engine, batches, ranks, lambda: calls.append(1), lambda: False)
    whole = make_engine(zero_stage=1).objective.model.eval()  # of the same seed, without dropout
    nll, hits, tokens = 0.0, 0, 0
    with torch.no_grad():
        for batch in batches:
            logits = whole(batch.source_BS, batch.target_in_BT).flatten(0, 1)
            target = batch.target_out_BT.flatten()
            nll += float(torch.nn.functional.cross_entropy(logits, target, ignore_index=0, reduction="sum"))
            hits += int(((logits.argmax(1) == target) & (target != 0)).sum())
            tokens += int((target != 0).sum())
    assert found["nll"] == pytest.approx(nll / tokens, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert found["token_accuracy"] == hits / tokens
    assert 0 < hits < tokens
    assert found["loss"] > 0
    assert len(calls) == len(batches)
    assert engine.objective.training


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": stage, "precision": precision, "freeze": freeze, "offload": offload}
        for stage, precision, offload in (
            *((stage, "fp32", "none") for stage in range(4)),
            (1, "fp16", "none"),
            (1, "bf16", "none"),
            (3, "fp16", "none"),
            (3, "fp32", "optimizer_and_parameters"),
        )
        for freeze in ((), ("*embedding*",))
    ],
    ids=str,
)
def test_copied_weights_are_whole(make_engine, settings):
    engine = make_engine(**settings)
    plain = make_engine(precision="fp32", zero_stage=0).objective.model  # of the same seed
    into = {name: torch.full_like(parameter, math.nan) for name, parameter in plain.named_parameters()}
    engine.copy_weights(into)
    for name, parameter in plain.named_parameters():
        rounded = settings["precision"] == "fp16" and not engine.objective.model.get_parameter(name).requires_grad
        expected = parameter.data.half().float() if rounded else parameter.data  # trained ones have a master in fp32
        assert torch.equal(into[name], expected), name


def test_the_dry_run_of_a_validation_takes_the_most_tokens_and_a_pair_above_the_budget():
    tokens = torch.ones(1, 1, dtype=torch.int64)
    shapes = [(8, 10, 10), (9, 9, 9), (1, 30, 90), (2, 30, 30)]
    batches = [
        MicroBatch(0, BatchShape(*shape, shape[0], 1, 1), tokens, tokens, tokens, torch.arange(1)) for shape in shapes
    ]
    assert translation._largest(batches) == [batches[1], batches[2]]


@given(st.integers(0, 60), st.integers(0, 12), st.integers(0, 5), st.integers(0, 10**6))
def test_samples_are_different_lines_half_of_them_the_same_at_each_step(num_lines, count, seed, step):
    fixed, drawn = sample_lines(num_lines, count, seed, step)
    assert (fixed, drawn) == sample_lines(num_lines, count, seed, step)
    assert fixed == sample_lines(num_lines, count, seed + 1, step + 1)[0]
    assert len(fixed) + len(drawn) == len({*fixed, *drawn}) == min(count, num_lines) or num_lines < count
    assert {*fixed, *drawn} <= {*range(num_lines)}
    assert 0 <= len(fixed) - len(drawn) <= 1 or num_lines < count


def test_the_drawn_lines_are_others_at_each_step_and_the_fixed_ones_are_spread_over_the_corpus():
    assert len({tuple(sample_lines(1000, 6, 1, step)[1]) for step in range(20)}) == 20
    assert sample_lines(1000, 6, 1, 0)[0] == [166, 500, 833]


def test_only_the_measures_of_further_corpora_have_a_name_in_front():
    assert ValidationSet("validation", ()).prefix == ""
    assert ValidationSet("news", ()).prefix == "news/"
