"""The whole network against torch.nn.Transformer, and what must hold of it whatever the weights."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.config.model_size import count_by_part, has_final_norm
from dist_transformer.config.schema import ModelConfig
from dist_transformer.model.attention import KeyValueCache
from dist_transformer.model.layers import (
    AddAndNorm,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    LearnedPositions,
    sinusoids,
)
from dist_transformer.model.transformer import Transformer

PAD, VOCABULARY = 0, 24
ODD_SIZES: dict[str, Any] = {"num_heads": 3, "key_size": 5, "value_size": 7}
"""3 heads do not divide a d_model of 16."""
LEARNED: dict[str, Any] = {"positions": "learned", "max_positions": 7}
MakeModel = Callable[..., Transformer]
Batch = tuple[Tensor, Tensor, Tensor]


def paired_parameters(ours: Transformer, theirs: nn.Transformer) -> Iterator[tuple[list[Tensor], Tensor]]:
    """(our parameters, to be stacked; torch's parameter) for each parameter of torch's network."""
    for mine, other in zip(ours.encoder_layers, theirs.encoder.layers, strict=True):
        attention, network = mine.self_attention, mine.feed_forward
        norms = [mine.self_attention_residual, mine.feed_forward_residual]
        pairs = [(other.self_attn, [attention.query_key_value], attention.output)]
        yield from paired_layer(pairs, network, norms, other)
    for mine, other in zip(ours.decoder_layers, theirs.decoder.layers, strict=True):
        attention, cross, network = mine.self_attention, mine.cross_attention, mine.feed_forward
        norms = [mine.self_attention_residual, mine.cross_attention_residual, mine.feed_forward_residual]
        pairs = [
            (other.self_attn, [attention.query_key_value], attention.output),
            (other.multihead_attn, [cross.query, cross.key_value], cross.output),
        ]
        yield from paired_layer(pairs, network, norms, other)
    for norm, other in ((ours.encoder_norm, theirs.encoder.norm), (ours.decoder_norm, theirs.decoder.norm)):
        if other is not None:
            yield [norm.weight], other.weight
            yield [norm.bias], other.bias


def paired_layer(
    attentions: list[Any], network: FeedForward, norms: list[AddAndNorm], other: Any
) -> Iterator[tuple[list[Tensor], Tensor]]:
    for torchs, projections, output in attentions:
        yield [projection.weight for projection in projections], torchs.in_proj_weight
        yield [projection.bias for projection in projections], torchs.in_proj_bias
        yield [output.weight], torchs.out_proj.weight
        yield [output.bias], torchs.out_proj.bias
    for mine, linear in ((network.inner, other.linear1), (network.outer, other.linear2)):
        yield [mine.weight], linear.weight
        yield [mine.bias], linear.bias
    for number, residual in enumerate(norms, start=1):
        yield [residual.norm.weight], getattr(other, f"norm{number}").weight
        yield [residual.norm.bias], getattr(other, f"norm{number}").bias


def torchs_transformer(config: ModelConfig) -> nn.Transformer:
    """torch's own network; without the final norms that it always has, where the configuration has none."""
    theirs = nn.Transformer(
        config.d_model,
        config.num_heads,
        config.num_encoder_layers,
        config.num_decoder_layers,
        config.d_ff,
        dropout=0.0,
        activation=F.silu if config.activation == "silu" else config.activation,
        batch_first=True,
        norm_first=config.norm == "pre",
        dtype=torch.float64,
    )
    if not has_final_norm(config):
        theirs.encoder.norm = theirs.decoder.norm = None
    return theirs


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    "given",
    [
        {"norm": "post"},
        {"norm": "pre"},
        {"norm": "post", "final_norm": True},
        {"norm": "pre", "final_norm": False},
        {"norm": "post", "activation": "gelu"},
        {"norm": "pre", "activation": "silu"},
    ],
    ids=str,
)
def test_the_network_and_its_gradient_equal_torchs_transformer(
    given: dict[str, Any], make_config: Callable[..., ModelConfig], make_model: MakeModel, batch: Batch
) -> None:
    source, target_in, target_out = batch
    ours, theirs = make_model(**given), torchs_transformer(make_config(**given))
    for mine, other in paired_parameters(ours, theirs):
        other.data.copy_(torch.cat(mine).data)
    assert sum(other.numel() for _, other in paired_parameters(ours, theirs)) == sum(
        parameter.numel() for parameter in theirs.parameters()
    )

    embedding = ours.source_embedding.weight.detach().clone().requires_grad_()
    embed = [F.embedding(ids, embedding) * 4.0 + sinusoids(ids.shape[1], 16).double() for ids in (source, target_in)]
    hidden = theirs(
        *embed,
        tgt_mask=torch.ones(6, 6, dtype=torch.bool).triu(1),
        src_key_padding_mask=source == PAD,
        memory_key_padding_mask=source == PAD,
    )
    logits = hidden @ embedding.T
    torch.testing.assert_close(ours(source, target_in), logits)

    options = dict(ignore_index=PAD, label_smoothing=0.1, reduction="sum")
    loss = F.cross_entropy(logits.flatten(0, 1), target_out.flatten(), **options)
    our_loss, _ = ours.loss(source, target_in, target_out, 0.1)
    torch.testing.assert_close(our_loss, loss)
    loss.backward()
    our_loss.backward()
    torch.testing.assert_close(ours.source_embedding.weight.grad, embedding.grad)
    for mine, other in paired_parameters(ours, theirs):
        torch.testing.assert_close(torch.cat([parameter.grad for parameter in mine]), other.grad)


def test_logits_have_one_row_for_each_target_token_and_one_column_for_each_piece(make_model: MakeModel) -> None:
    model = make_model(source_vocabulary=40, target_vocabulary=50, shared_embeddings=False).float()
    logits = model(torch.randint(1, 40, (32, 100)), torch.randint(1, 50, (32, 100)))
    assert logits.shape == (32, 100, 50)


def test_embeddings_are_multiplied_by_the_square_root_of_d_model(make_model: MakeModel, batch: Batch) -> None:
    model = make_model()
    entered: list[Tensor] = []
    for stack in (model.encoder_layers, model.decoder_layers):
        stack[0].register_forward_pre_hook(lambda _, arguments: entered.append(arguments[0]))
    model(batch[0], batch[1])
    for ids, given in zip(batch[:2], entered, strict=True):
        expected = model.source_embedding.weight[ids] * 16**0.5 + sinusoids(ids.shape[1], 16)
        torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_more_padding_changes_nothing(norm: str, make_model: MakeModel, batch: Batch) -> None:
    source, target_in, target_out = batch
    model = make_model(norm=norm)
    padded = [F.pad(ids, (0, 9), value=PAD) for ids in batch]
    is_real = target_in != PAD
    torch.testing.assert_close(model(padded[0], padded[1])[:, :6][is_real], model(source, target_in)[is_real])
    ours, theirs = model.loss(*padded, 0.1), model.loss(source, target_in, target_out, 0.1)
    torch.testing.assert_close(ours, theirs)


def test_no_target_position_sees_its_future(make_model: MakeModel, batch: Batch) -> None:
    source, target_in, _ = batch
    model = make_model()
    logits = model(source, target_in)
    for position in range(1, 6):
        changed = target_in.clone()
        changed[:, position:] = torch.randint(3, VOCABULARY, changed[:, position:].shape)
        torch.testing.assert_close(model(source, changed)[:, :position], logits[:, :position], rtol=0, atol=1e-12)


def test_every_target_position_sees_the_whole_source_and_its_past(make_model: MakeModel, batch: Batch) -> None:
    source, target_in, _ = batch
    model = make_model()
    logits = model(source, target_in)
    other_source, other_target = source.clone(), target_in.clone()
    other_source[0, 6] = (source[0, 6] - 2) % (VOCABULARY - 3) + 3
    other_target[0, 0] = (target_in[0, 0] - 2) % (VOCABULARY - 3) + 3
    for changed in (model(other_source, target_in), model(source, other_target)):
        assert ((changed[0] - logits[0]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("shared_embeddings", [True, False])
@pytest.mark.parametrize("tied_output", [True, False])
@pytest.mark.parametrize("given", [{"norm": "post"}, {"norm": "pre"}, ODD_SIZES, LEARNED], ids=str)
def test_the_parameter_count_formula_counts_the_parameters(
    shared_embeddings: bool, tied_output: bool, given: dict[str, Any], make_config: Callable[..., ModelConfig]
) -> None:
    config = make_config(shared_embeddings=shared_embeddings, tied_output=tied_output, **given)
    target_vocabulary = 32 if shared_embeddings else 40
    model = Transformer(config, 32, target_vocabulary, PAD)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert count_by_part(config, 32, target_vocabulary).total == counted


def test_tying_makes_one_matrix_of_three(make_model: MakeModel) -> None:
    tied = make_model()
    assert tied.source_embedding.weight is tied.target_embedding.weight is tied.output_weight
    assert [name for name, _ in tied.named_parameters() if "embedding" in name] == ["source_embedding.weight"]
    apart = make_model(shared_embeddings=False, tied_output=False)
    matrices = {apart.source_embedding.weight, apart.target_embedding.weight, apart.output_weight}
    assert len(matrices) == 3


@pytest.mark.parametrize("gain", [1.0, 0.7071])
def test_initial_matrices_are_xavier_uniform_one_by_one_and_embeddings_normal(
    make_config: Callable[..., ModelConfig], gain: float
) -> None:
    model = Transformer(make_config(d_model=64, d_ff=128, attention_gain=gain), 1000, 1000, PAD)
    encoder_layer, decoder_layer = model.encoder_layers[0], model.decoder_layers[0]
    assert isinstance(encoder_layer, EncoderLayer)
    assert isinstance(decoder_layer, DecoderLayer)
    square = (6 / (64 + 64)) ** 0.5
    blocks = [*encoder_layer.self_attention.query_key_value.weight.chunk(3)]
    blocks += [*decoder_layer.cross_attention.key_value.weight.chunk(2), decoder_layer.cross_attention.query.weight]
    for block in blocks:
        assert 0.95 * gain * square < block.abs().max() <= gain * square
    for output in (encoder_layer.self_attention.output, decoder_layer.cross_attention.output):
        assert 0.95 * square < output.weight.abs().max() <= square
    inner_bound = (6 / (64 + 128)) ** 0.5
    assert 0.95 * inner_bound < encoder_layer.feed_forward.inner.weight.abs().max() <= inner_bound
    assert float(model.source_embedding.weight.detach().std()) == pytest.approx(64**-0.5, rel=0.02)
    assert model.source_embedding.weight[PAD].abs().sum() > 0
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_dropout_makes_training_random_and_leaves_evaluation_alone(make_model: MakeModel, batch: Batch) -> None:
    model = make_model(dropout=0.5)
    assert not torch.equal(model(batch[0], batch[1]), model(batch[0], batch[1]))
    model.eval()
    assert torch.equal(model(batch[0], batch[1]), model(batch[0], batch[1]))


def test_dropout_acts_on_the_sums_of_embeddings_and_positions(make_model: MakeModel) -> None:
    model, ids = make_model(dropout=0.25), torch.randint(3, VOCABULARY, (20, 30))
    entered: list[Tensor] = []
    for stack in (model.encoder_layers, model.decoder_layers):
        stack[0].register_forward_pre_hook(lambda _, arguments: entered.append(arguments[0]))
    model(ids, ids)
    whole = model.source_embedding.weight[ids] * 16**0.5 + sinusoids(30, 16)
    for dropped in entered:
        kept = dropped != 0
        torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
        assert abs(kept.double().mean() - 0.75) < 0.02


def test_a_half_precision_model_agrees_with_the_exact_one(make_model: MakeModel, batch: Batch) -> None:
    model = make_model()
    exact, (exact_loss, _) = model(batch[0], batch[1]), model.loss(*batch, 0.1)
    model.half()
    torch.testing.assert_close(model(batch[0], batch[1]).double(), exact, rtol=0.02, atol=0.05)
    loss, _ = model.loss(*batch, 0.1)
    torch.testing.assert_close(loss.double(), exact_loss, rtol=2e-3, atol=0)
    assert loss.dtype == torch.float32


def test_attention_maps_are_distributions_that_leave_out_padding_and_future(
    make_model: MakeModel, batch: Batch
) -> None:
    source, target_in, _ = batch
    maps = make_model().attention_maps(source, target_in)
    assert [tuple(weights.shape) for weights in maps.encoder] == [(3, 4, 7, 7)] * 2
    assert [tuple(weights.shape) for weights in maps.decoder] == [(3, 4, 6, 6)] * 3
    assert [tuple(weights.shape) for weights in maps.cross] == [(3, 4, 6, 7)] * 3
    for weights in (*maps.encoder, *maps.decoder, *maps.cross):
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    for weights in (*maps.encoder, *maps.cross):
        assert not weights[1, :, :, 4:].any()
    for weights in maps.decoder:
        assert torch.equal(weights, weights.tril())


def test_attention_maps_leave_no_hooks_behind(make_model: MakeModel, batch: Batch) -> None:
    model = make_model()
    model.attention_maps(batch[0], batch[1])
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("given", [{"norm": "post"}, {"norm": "pre"}, ODD_SIZES, LEARNED], ids=str)
def test_cached_decoding_equals_uncached(given: dict[str, Any], make_model: MakeModel, batch: Batch) -> None:
    source, target_in, _ = batch
    model = make_model(**given)
    cache = model.start_decoding(model.encode(source), source)
    stepwise = [model.decode_step(token, cache) for token in target_in.T]
    torch.testing.assert_close(torch.stack(stepwise, 1), model(source, target_in))


def test_cached_decoding_equals_uncached_beyond_the_places_that_there_are_at_first(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeyValueCache, "FIRST_PLACES", 2)
    source, target_in, beam_size = torch.tensor([[5, 6, 2]]), torch.randint(4, 13, (3, 9)), 3
    target_in[:, 0] = 1
    model = make_model()
    cache = model.start_decoding(model.encode(source), source, beam_size)
    for column in range(9):
        found = model.decode_step(target_in[:, column], cache)
        torch.testing.assert_close(found, model(source.expand(3, -1), target_in[:, : column + 1])[:, -1])
        order = torch.randint(0, 3, (3,))
        cache.reorder(order)
        target_in = target_in[order]


def test_cached_decoding_follows_rows_that_are_reordered_repeated_and_dropped(
    make_model: MakeModel, batch: Batch
) -> None:
    source, target, _ = batch
    model = make_model()
    cache = model.start_decoding(model.encode(source), source)
    model.decode_step(target[:, 0], cache)
    rows = torch.tensor([2, 0, 2])
    cache.select(rows)
    source, target = source[rows], torch.cat([target[rows, :1], torch.tensor([[5], [6], [7]])], 1)
    torch.testing.assert_close(model.decode_step(target[:, 1], cache), model(source, target)[:, -1])


@pytest.mark.parametrize("given", [{}, ODD_SIZES, LEARNED], ids=str)
def test_cached_decoding_of_beams_equals_decoding_each_row_alone(
    given: dict[str, Any], make_model: MakeModel, batch: Batch
) -> None:
    source = batch[0]
    model, beam_size = make_model(**given), 2
    cache = model.start_decoding(model.encode(source), source, beam_size)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]]).T
    model.decode_step(tokens[:, 0], cache)
    cache.reorder(torch.tensor([1, 1, 2, 3, 5, 4]))
    tokens = torch.cat([tokens[[1, 1, 2, 3, 5, 4]], torch.tensor([[11, 12, 13, 14, 15, 16]]).T], 1)
    model.decode_step(tokens[:, 1], cache)
    kept = torch.tensor([5, 4, 0, 1])
    cache.select(kept)
    tokens = torch.cat([tokens[kept], torch.tensor([[17, 18, 19, 20]]).T], 1)
    expected = model(source[[2, 2, 0, 0]], tokens)[:, -1]
    torch.testing.assert_close(model.decode_step(tokens[:, 2], cache), expected)


def test_key_and_value_sizes_that_are_the_default_give_the_same_model_to_the_bit(
    make_model: MakeModel, batch: Batch
) -> None:
    torch.manual_seed(1)
    default = make_model()
    torch.manual_seed(1)
    given = make_model(key_size=4, value_size=4)
    assert all(torch.equal(a, b) for a, b in zip(default.parameters(), given.parameters(), strict=True))
    assert torch.equal(default(batch[0], batch[1]), given(batch[0], batch[1]))


def test_initial_matrices_of_odd_sizes_are_xavier_uniform_one_by_one(make_config: Callable[..., ModelConfig]) -> None:
    model = Transformer(make_config(d_model=64, num_heads=3, key_size=8, value_size=40), 10, 10, PAD)
    layer = model.decoder_layers[0]
    assert isinstance(layer, DecoderLayer)
    keys, values = 24, 120
    blocks = [*torch.split(layer.self_attention.query_key_value.weight, [keys, keys, values])]
    blocks += [layer.cross_attention.query.weight, *torch.split(layer.cross_attention.key_value.weight, [keys, values])]
    for block in blocks:
        bound = (6 / (64 + len(block))) ** 0.5
        assert 0.9 * bound < block.abs().max() <= bound


def test_learned_positions_that_hold_the_sinusoids_give_the_sinusoidal_model(
    make_model: MakeModel, batch: Batch
) -> None:
    torch.manual_seed(1)
    sinusoidal = make_model()
    learned = make_model(**LEARNED)
    with torch.no_grad():
        for name, parameter in learned.named_parameters():
            is_position = "positions" in name
            parameter.copy_(sinusoids(7, 16) if is_position else dict(sinusoidal.named_parameters())[name])
    torch.testing.assert_close(learned(batch[0], batch[1]), sinusoidal(batch[0], batch[1]))


def test_source_and_target_learn_positions_of_their_own(make_model: MakeModel, batch: Batch) -> None:
    model = make_model(**LEARNED)
    model.loss(*batch, 0.1)[0].backward()
    for positions in (model.source_positions, model.target_positions):
        assert isinstance(positions, LearnedPositions)
        assert positions.table.weight.grad is not None
        assert positions.table.weight.grad.abs().sum() > 0
    assert model.source_positions is not model.target_positions
    assert not model.target_positions.table.weight.grad[6].any()  # a target of 6 tokens has no seventh position
