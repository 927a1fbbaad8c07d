"""When gradients are sent, in which buckets, and which layer waits for which weights."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from plain_torch import TINY, VOCABULARY, tokens_of

from dist_transformer.distributed.group import Ranks
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine import gradient_exchange
from dist_transformer.training.engine.gradient_exchange import (
    Bucket,
    GradientExchange,
    WeightGather,
    in_buckets,
    in_order_of_backward,
)
from dist_transformer.training.engine.objective import Objective

MORE_PARAMETERS = [
    {},
    {"shared_embeddings": False, "tied_output": False},
    {"norm": "pre", "output_bias": True},
    {"positions": "learned", "max_positions": 64, "shared_embeddings": False},
]


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradient_exchange, "LEAST_ELEMENTS", 500)


@pytest.mark.parametrize("settings", MORE_PARAMETERS, ids=str)
def test_parameters_are_in_the_order_in_which_a_backward_pass_completes_their_gradients(batches, settings):
    config = TINY.model_copy(update=settings)
    model = Transformer(config, VOCABULARY, VOCABULARY, 0)
    completed = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(completed.append)
    model.loss(*batches[0][:3], 0.1)[0].backward()
    order = in_order_of_backward(model)
    assert {id(p) for p in order} == {id(p) for p in completed}
    layers = [*model.encoder_layers, *model.decoder_layers]
    layer_of = {id(p): number for number, layer in enumerate(layers) for p in layer.parameters()}
    found, expected = ([layer_of.get(id(p), -1) for p in some] for some in (order, completed))
    assert [n for n in found if n >= 0] == [n for n in expected if n >= 0]
    assert order[-1] is model.source_embedding.weight


def test_a_large_parameter_is_a_bucket_of_its_own_and_small_ones_share_one(monkeypatch):
    monkeypatch.setattr(gradient_exchange, "LEAST_ELEMENTS", 100)
    sizes = [10, 60, 50, 300, 10, 10]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    assert [[p.numel() for p in bucket] for bucket in in_buckets(16, parameters)] == [[10, 60, 50], [300], [10, 10]]


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_sent_in_the_last_backward_pass_while_it_goes_on(
    make_engine, batches, small_buckets, monkeypatch, stage
):
    engine, events = make_engine(zero_stage=stage), []
    start, end = Ranks.start_mean, GradientExchange.end_backward

    def noted(ranks, *arguments):
        events.append("sent")
        return start(ranks, *arguments)

    def noted_end(exchange):
        events.append("end")
        end(exchange)

    monkeypatch.setattr(Ranks, "start_mean", noted)
    monkeypatch.setattr(GradientExchange, "end_backward", noted_end)
    engine.objective.model.source_embedding.weight.register_hook(lambda _: events.append("last gradient"))
    tokens = tokens_of(batches[:2])
    for number in range(2):
        engine.backward(engine(*batches[number])[0], tokens, is_last=number == 1)
    engine.step(1e-2)
    num_buckets = events.count("sent") // stage
    assert num_buckets > 5
    sends = [*["sent"] * (num_buckets - 1), "last gradient", "sent", "end"]
    assert events == ["last gradient", "end", *sends] if stage == 1 else [*sends, *sends]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_are_the_same_however_often_they_are_sent(make_engine, batches, small_buckets, stage, precision):
    norms = []
    for sends_each in (True, False):
        engine = make_engine(zero_stage=stage, precision=precision, initial_loss_scale=1024)
        for number in range(3):
            engine.backward(engine(*batches[number])[0], tokens_of(batches[:3]), is_last=sends_each or number == 2)
        assert engine.step(1e-2)
        norms.append(engine.gradient_norm())
    assert norms[0] == pytest.approx(norms[1], rel=1e-3 if precision == "fp16" else 1e-6)


def test_each_layer_waits_for_its_own_weights_and_not_for_those_of_later_ones(batches, ranks, small_buckets):
    model = Transformer(
        TINY.model_copy(update={"num_encoder_layers": 3, "num_decoder_layers": 3}), VOCABULARY, VOCABULARY, 0
    )
    buckets = [Bucket(bucket, 0) for bucket in in_buckets(16, in_order_of_backward(model))]
    objective, arrived, early = Objective(model, 0.1, "fp32"), set(), []
    gather = WeightGather(objective, model, buckets, ranks)
    for layer in [*model.encoder_layers, *model.decoder_layers]:
        needed = {
            n for n, bucket in enumerate(buckets) if {*map(id, bucket.parameters)} & {*map(id, layer.parameters())}
        }
        layer.register_forward_pre_hook(lambda *_, needed=needed: early.append((needed <= arrived, len(arrived))))
    gather._pending = {number: SimpleNamespace(wait=partial(arrived.add, number)) for number in range(len(buckets))}
    objective(*batches[0])
    assert all(is_there for is_there, _ in early)
    counts = [count for _, count in early]
    assert counts == sorted(set(counts))
    assert counts[-1] == len(buckets)
