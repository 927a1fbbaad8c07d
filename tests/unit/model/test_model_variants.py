"""Each option of the model against its formula, and what must hold of the network with all of them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_choices import CHOICES
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.config.model_size import count_by_part
from dist_transformer.config.parameter_names import all_parameter_names
from dist_transformer.config.schema import ModelConfig
from dist_transformer.model.attention import SelfAttention, apply_rotary
from dist_transformer.model.layers import (
    RMS_EPSILON,
    AddAndNorm,
    DecoderLayer,
    DeepNorm,
    EncoderLayer,
    FeedForward,
    NoPositions,
    SinusoidalPositions,
    sinusoids,
)
from dist_transformer.model.transformer import Transformer

PAD, VOCABULARY = 0, 24
MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., Transformer]
Batch = tuple[Tensor, Tensor, Tensor]

DEEP: dict[str, Any] = {"norm": "deepnorm", "positions": "rotary", "activation": "swiglu", "output_bias": True}
LIKE_LLAMA: dict[str, Any] = {"norm": "pre", "positions": "rotary", "activation": "swiglu", "norm_type": "rms"}
LIKE_MARIAN: dict[str, Any] = {"activation": "silu", "output_bias": True, "positions": "marian"}
APART: dict[str, Any] = {"norm": "pre", "final_norm": False, "activation": "gelu", "shared_embeddings": False}
ENDS: dict[str, Any] = {"final_norm": True, "norm_type": "rms", "shared_embeddings": False, "tied_output": False}
VARIANTS = [DEEP, LIKE_LLAMA, LIKE_MARIAN, APART, ENDS]


# ------------------------------------------------------------------------------------------------ rotary positions


def turned_as_complex_numbers(vectors: Tensor, start: int = 0) -> Tensor:
    """x_j + i x_(j + 1) times exp(i t / 10000^(j / K)) for each position t of (..., T, K) and each even j; float64."""
    length, size = vectors.shape[-2:]
    numbers = torch.view_as_complex(vectors.unflatten(-1, (size // 2, 2)).contiguous())
    for t in range(length):
        for i in range(size // 2):
            angle = (start + t) / 10000 ** (2 * i / size)
            numbers[..., t, i] *= complex(math.cos(angle), math.sin(angle))
    return torch.view_as_real(numbers).flatten(-2)


def test_queries_and_keys_are_turned_pair_by_pair_by_their_positions() -> None:
    vectors = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    given = apply_rotary(vectors, SinusoidalPositions(8)(40, 5, torch.empty(0)))
    torch.testing.assert_close(given, turned_as_complex_numbers(vectors.clone(), 40), rtol=0, atol=1e-6)


def test_a_turned_query_and_key_see_their_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    table = sinusoids(400, 16).double()

    def product(at_query: int, at_key: int) -> float:
        return float((apply_rotary(query, table[at_query, None]) * apply_rotary(key, table[at_key, None])).sum())

    assert product(7, 4) == pytest.approx(product(303, 300), abs=1e-5)
    assert product(7, 4) != pytest.approx(product(7, 5), abs=1e-3)
    assert product(9, 9) == pytest.approx(float((query * key).sum()), abs=1e-6)


def test_turning_in_half_precision_rounds_once() -> None:
    vectors = torch.randn(1, 2, 6, 8).half()
    exact = apply_rotary(vectors.double(), sinusoids(300, 8)[294:])
    given = apply_rotary(vectors, sinusoids(300, 8)[294:])
    assert given.dtype == torch.float16
    assert torch.equal(given, exact.half())


def test_the_gradient_of_turned_vectors_is_that_of_small_changes() -> None:
    vectors = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(apply_rotary, (vectors, sinusoids(4, 6).double()))


def test_a_compiler_turns_vectors_with_real_numbers_to_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, table = torch.randn(2, 3, 5, 8), sinusoids(5, 8)
    given = apply_rotary(vectors, table)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(apply_rotary(vectors, table), given, rtol=1e-6, atol=1e-6)


def test_a_table_of_positions_that_a_search_made_can_be_trained_with(make_model: MakeModel, batch: Batch) -> None:
    source, target_in, target_out = batch
    model = make_model(positions="rotary")
    with torch.inference_mode():
        model.encode(source)
    loss, _ = model.loss(source, target_in, target_out, 0.1)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention_with_rotary_positions_is_attention_of_turned_queries_and_keys(is_causal: bool) -> None:
    config = ModelConfig(d_model=12, num_heads=3, key_size=4, value_size=2)
    module = SelfAttention(config, is_causal, SinusoidalPositions(4)).double()
    inputs = torch.randn(2, 5, 12, dtype=torch.float64)
    query, key, value = (
        part.unflatten(-1, (3, -1)).transpose(1, 2)
        for part in torch.split(module.query_key_value(inputs).detach(), [12, 12, 6], -1)
    )
    query, key = turned_as_complex_numbers(query.clone()), turned_as_complex_numbers(key.clone())
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    expected = module.output(attended.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(inputs), expected, rtol=0, atol=1e-6)
    shown = module.weights(inputs) @ value
    torch.testing.assert_close(shown, attended, rtol=0, atol=1e-6)


def test_with_rotary_positions_nothing_is_added_to_embeddings_and_the_order_still_matters(
    make_model: MakeModel, batch: Batch
) -> None:
    source, target_in, _ = batch
    model = make_model(positions="rotary")
    assert isinstance(model.source_positions, NoPositions)
    entered: list[Tensor] = []
    model.encoder_layers[0].register_forward_pre_hook(lambda _, arguments: entered.append(arguments[0]))
    model.encode(source)
    assert torch.equal(entered[0], model.source_embedding.weight[source] * 4.0)
    swapped = source.clone()
    swapped[0, 1], swapped[0, 2] = source[0, 2], source[0, 1]
    assert source[0, 1] != source[0, 2]
    assert not torch.allclose(model(swapped, target_in)[0], model(source, target_in)[0])


# ------------------------------------------------------------------------------------------- norms and feed-forward


def test_rms_norm_divides_by_the_root_of_the_mean_square_and_has_a_gain_only(make_config: MakeConfig) -> None:
    block, inputs = AddAndNorm(make_config(norm_type="rms")).double(), torch.randn(2, 3, 16, dtype=torch.float64)
    assert [name for name, _ in block.named_parameters()] == ["norm.weight"]
    nn.init.normal_(block.norm.weight)
    expected = inputs / (inputs.square().mean(-1, keepdim=True) + RMS_EPSILON).sqrt() * block.norm.weight
    torch.testing.assert_close(block(inputs, torch.zeros_like), expected)


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
        ("silu", lambda x: x / (1 + torch.exp(-x))),
    ],
)
def test_feed_forward_with_another_activation(activation: str, function: Callable[[Tensor], Tensor]) -> None:
    network, inputs = FeedForward(6, 10, activation).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(network(inputs), network.outer(function(network.inner(inputs))))


def test_swiglu_multiplies_a_linear_form_by_a_gate() -> None:
    network, x = FeedForward(6, 10, "swiglu").double(), torch.randn(2, 3, 6, dtype=torch.float64)
    assert network.gate is not None
    gate = x @ network.gate.weight.T + network.gate.bias
    gated = gate / (1 + torch.exp(-gate)) * (x @ network.inner.weight.T + network.inner.bias)
    torch.testing.assert_close(network(x), gated @ network.outer.weight.T + network.outer.bias)


# ------------------------------------------------------------------------------------------------------- DeepNorm


def test_deepnorm_normalises_the_sum_with_a_weighted_residual(make_config: MakeConfig) -> None:
    block, inputs = AddAndNorm(make_config(norm="deepnorm"), alpha=2.5).double(), torch.randn(2, 3, 16).double()
    torch.testing.assert_close(block(inputs, torch.square), block.norm(inputs * 2.5 + inputs.square()))


@pytest.mark.parametrize(("encoders", "decoders"), [(6, 6), (18, 6), (100, 100)])
def test_deepnorms_numbers_are_those_that_bound_the_update_of_the_model(
    make_config: MakeConfig, encoders: int, decoders: int
) -> None:
    """Table 1 of Wang et al. (2022), by logarithms; and what their decoder's solve: 3 M (2 beta^2) / alpha^2 = 1."""
    config = make_config(norm="deepnorm", num_encoder_layers=encoders, num_decoder_layers=decoders)
    of_encoder, of_decoder = DeepNorm.of_encoder(config), DeepNorm.of_decoder(config)
    depth = (4 * math.log(encoders) + math.log(decoders)) / 16
    assert math.log(of_encoder.alpha) == pytest.approx(math.log(0.81) + depth)
    assert math.log(of_encoder.beta) == pytest.approx(math.log(0.87) - depth)
    assert of_decoder.alpha**4 == pytest.approx(3 * decoders)
    assert 3 * decoders * 2 * of_decoder.beta**2 / of_decoder.alpha**2 == pytest.approx(1)


def test_deepnorm_begins_with_small_values_outputs_and_feed_forwards_but_not_with_small_queries_and_keys(
    make_config: MakeConfig,
) -> None:
    sizes = {"d_model": 64, "d_ff": 128, "num_encoder_layers": 8, "num_decoder_layers": 3}
    config = make_config(norm="deepnorm", activation="swiglu", **sizes)
    model = Transformer(config, 10, 10, PAD)
    for layer, beta in (
        (model.encoder_layers[0], DeepNorm.of_encoder(config).beta),
        (model.decoder_layers[0], DeepNorm.of_decoder(config).beta),
    ):
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        assert beta < 0.9
        query, key, value = layer.self_attention.query_key_value.weight.chunk(3)
        plain, scaled = [query, key], [value, layer.self_attention.output.weight]
        if isinstance(layer, DecoderLayer):
            cross_key, cross_value = layer.cross_attention.key_value.weight.chunk(2)
            plain += [layer.cross_attention.query.weight, cross_key]
            scaled += [cross_value, layer.cross_attention.output.weight]
        network = layer.feed_forward
        assert network.gate is not None
        scaled += [network.inner.weight, network.outer.weight, network.gate.weight]
        for matrix, gain in [*((matrix, 1.0) for matrix in plain), *((matrix, beta) for matrix in scaled)]:
            bound = gain * (6 / sum(matrix.shape)) ** 0.5
            assert 0.95 * bound < matrix.abs().max() <= bound * (1 + 1e-6)
        assert layer.feed_forward_residual.alpha > 1


def test_a_deep_stack_is_changed_less_by_one_layer_with_deepnorm_than_with_post_norm(make_config: MakeConfig) -> None:
    """What it is for: each layer of a deep stack begins near the identity."""

    def change(norm: str) -> float:
        torch.manual_seed(2)
        config = make_config(norm=norm, num_encoder_layers=48, num_decoder_layers=1)
        layer, inputs = Transformer(config, 10, 10, PAD).encoder_layers[0], F.layer_norm(torch.randn(4, 9, 16), (16,))
        output = layer(inputs, torch.ones(4, 1, 1, 9, dtype=torch.bool)).detach()
        return float((output - inputs).norm() / inputs.norm())

    assert change("deepnorm") < 0.5 * change("post")


# ------------------------------------------------------------------------------------------------------- LayerDrop


def outputs_of_first_layer(model: Transformer, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(what entered the first encoder layer, what it gave, what entered the second)."""
    seen: list[Tensor] = []
    hooks = [
        model.encoder_layers[0].register_forward_hook(lambda _, given, output: seen.extend((given[0], output))),
        model.encoder_layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0])),
    ]
    model.encode(source)
    for hook in hooks:
        hook.remove()
    return seen[0], seen[1], seen[2]


def test_each_sentence_skips_a_layer_with_the_given_probability(make_model: MakeModel) -> None:
    model = make_model(layer_drop=0.3)
    entered, given, left = outputs_of_first_layer(model, torch.randint(3, VOCABULARY, (2000, 4)))
    skipped = (left == entered).all(-1).all(-1)
    assert abs(skipped.double().mean() - 0.3) < 0.05
    assert torch.equal(left[skipped], entered[skipped])
    assert torch.equal(left[~skipped], given[~skipped])


def test_evaluation_and_decoding_skip_no_layer(make_model: MakeModel, batch: Batch) -> None:
    source, target_in, _ = batch
    model = make_model(layer_drop=0.6)
    whole = make_model()
    whole.load_state_dict(model.state_dict())
    assert not torch.equal(model(source, target_in), whole(source, target_in))
    model.eval()
    assert torch.equal(model(source, target_in), whole(source, target_in))


def test_every_parameter_has_a_gradient_where_most_layers_are_skipped(make_model: MakeModel, batch: Batch) -> None:
    """A rank without one would wait in DeepSpeed's collectives for ever."""
    model = make_model(layer_drop=0.95)
    model.loss(*batch, 0.1)[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    layers = [layer.self_attention.output.weight.grad for layer in (*model.encoder_layers, *model.decoder_layers)]
    assert any(not gradient.any() for gradient in layers)


# ------------------------------------------------------------------------------------------------- the whole network


@pytest.mark.parametrize("given", [*CHOICES, *VARIANTS], ids=str)
def test_the_parameter_count_formula_counts_the_parameters_of_variants(
    given: dict[str, Any], make_config: MakeConfig
) -> None:
    config = make_config(**given)
    target_vocabulary = 32 if config.shared_embeddings else 40
    model = Transformer(config, 32, target_vocabulary, PAD)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert count_by_part(config, 32, target_vocabulary).total == counted


@pytest.mark.parametrize("given", [*CHOICES, *VARIANTS], ids=str)
@pytest.mark.parametrize(
    "apart", [{}, {"shared_embeddings": False}, {"shared_embeddings": False, "tied_output": False}]
)
@pytest.mark.parametrize("ends", [{}, {"output_bias": True, "final_norm": True}, {"final_norm": False, "norm": "pre"}])
def test_the_names_of_the_parameters_are_known_without_a_model(
    given: dict[str, Any], apart: dict[str, bool], ends: dict[str, Any], make_config: MakeConfig
) -> None:
    config = make_config(**{**given, **apart, **ends})
    model = Transformer(config, 32, 32, PAD)
    names = sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    assert all_parameter_names(config) == names


@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_cached_decoding_of_variants_equals_uncached(
    given: dict[str, Any], make_model: MakeModel, batch: Batch
) -> None:
    source, target_in, _ = batch
    model = make_model(**given)
    cache = model.start_decoding(model.encode(source), source)
    stepwise = [model.decode_step(token, cache) for token in target_in.T]
    torch.testing.assert_close(torch.stack(stepwise, 1), model(source, target_in))


@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_more_padding_changes_nothing_in_variants(given: dict[str, Any], make_model: MakeModel, batch: Batch) -> None:
    model = make_model(**given)
    padded = [F.pad(ids, (0, 9), value=PAD) for ids in batch]
    torch.testing.assert_close(model.loss(padded[0], padded[1], padded[2], 0.1), model.loss(*batch, 0.1))


@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_no_target_position_of_variants_sees_its_future(
    given: dict[str, Any], make_model: MakeModel, batch: Batch
) -> None:
    source, target_in, _ = batch
    model = make_model(**given)
    changed = target_in.clone()
    changed[:, 3:] = torch.randint(3, VOCABULARY, (3, 3))
    before, after = model(source, target_in), model(source, changed)
    torch.testing.assert_close(after[:, :3], before[:, :3], rtol=0, atol=1e-12)
    assert not torch.allclose(after[:, 3:], before[:, 3:])


@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_variants_in_half_precision_agree_with_the_exact_ones(
    given: dict[str, Any], make_model: MakeModel, batch: Batch
) -> None:
    model = make_model(**given)
    exact = model.loss(*batch, 0.1)[0]
    loss, _ = model.half().loss(*batch, 0.1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=3e-3, atol=0)


@pytest.mark.parametrize("given", [DEEP, LIKE_LLAMA], ids=str)
def test_activation_checkpointing_changes_no_gradient_of_variants(
    given: dict[str, Any], make_config: MakeConfig, batch: Batch
) -> None:
    """Dropout and skipped layers included: the layer that is computed again draws the same numbers."""
    config = make_config(dropout=0.2, layer_drop=0.3, **given)
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(4)
        model = Transformer(config, VOCABULARY, VOCABULARY, PAD, activation_checkpointing=is_checkpointed)
        model.loss(*batch, 0.1)[0].backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_output_bias_is_added_to_logits_and_loss(make_model: MakeModel, batch: Batch) -> None:
    source, target_in, target_out = batch
    model, plain = make_model(output_bias=True), make_model()
    assert model.output_bias is not None
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name != "output_bias"})
    logits = model(source, target_in)
    torch.testing.assert_close(logits, plain(source, target_in) + model.output_bias)
    expected = F.cross_entropy(logits.flatten(0, 1), target_out.flatten(), ignore_index=PAD, reduction="sum")
    loss, nll = model.loss(*batch, 0.0)
    torch.testing.assert_close((loss, nll), (expected, expected.detach()))
    quietly = model.loss(*batch, 0.0, counts_hits=True)
    torch.testing.assert_close(quietly[0], expected.detach())
    is_real = target_out != PAD
    hits = (logits.argmax(-1) == target_out)[is_real].sum()
    assert quietly[2] == hits
    (ours,) = torch.autograd.grad(loss, model.output_bias)
    (theirs,) = torch.autograd.grad(expected, model.output_bias)
    torch.testing.assert_close(ours, theirs)
