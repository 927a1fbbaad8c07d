"""Model FLOPs against torch's own counter on a real step, and the peaks that GPUs are said to have."""

import pytest
import torch
from flop_counting import flop_counter
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from dist_transformer.config.schema import ModelConfig
from dist_transformer.model.transformer import Transformer
from dist_transformer.planning.flops import model_flops, published_flops

SMALL = dict(preset="tiny", d_model=64, d_ff=96, num_heads=4, num_encoder_layers=2, num_decoder_layers=3)


def counted(config: ModelConfig, vocabulary: int, pairs: int, source_length: int, target_length: int) -> int:
    """FLOPs of a real forward and backward pass; attention is written out, for the counter knows no kernel of CPUs."""
    model = Transformer(config, vocabulary, vocabulary, 0)
    source, target = torch.full((pairs, source_length), 5), torch.full((pairs, target_length), 5)
    with sdpa_kernel(SDPBackend.MATH), flop_counter() as counter:
        model.loss(source, target, target, 0.1)[0].backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        {**SMALL, "shared_embeddings": False, "tied_output": False},
        {**SMALL, "norm": "pre", "norm_type": "rms", "output_bias": True},
        {**SMALL, "activation": "swiglu", "positions": "rotary"},
        {**SMALL, "key_size": 12, "value_size": 20, "dropout": 0.3},
        {"preset": "base"},
    ],
    ids=["small", "untied", "pre-norm", "swiglu", "other heads", "base"],
)
def test_model_flops_are_those_that_torch_counts_in_a_step_without_padding(settings):
    config = ModelConfig(**settings)
    found = model_flops(config, 72, 3, 3 * 11, 3 * 7)
    assert found.total == counted(config, 72, 3, 11, 7)
    assert found.total == found.projections + found.scores + found.feed_forward + found.output


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8))
def test_pairs_are_counted_one_by_one_but_for_their_scores_which_are_those_of_mean_lengths(lengths):
    config = ModelConfig(**SMALL)
    one_by_one = [model_flops(config, 72, 1, *pair) for pair in lengths]
    found = model_flops(config, 72, len(lengths), *(sum(side) for side in zip(*lengths, strict=True)))
    for part in ("projections", "feed_forward", "output"):
        assert getattr(found, part) == pytest.approx(sum(getattr(one, part) for one in one_by_one))
    scores = sum(one.scores for one in one_by_one)
    assert found.scores <= scores * (1 + 1e-9)
    if len(set(lengths)) == 1:
        assert found.scores == pytest.approx(scores)


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
    ],
)
def test_gpus_of_the_table_have_their_data_sheets_peak(name, precision, tera):
    assert published_flops(name, precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA H200 NVL", "bf16"),  # of lower clocks
        ("NVIDIA H100 PCIe", "bf16"),
        ("NVIDIA GH200 480GB", "bf16"),
        ("Tesla V100-PCIE-16GB", "fp16"),
        ("Tesla V100-SXM2-32GB", "bf16"),  # which has no units for it
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "fp16"),  # slices of a GPU
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA H200 MIG 1g.18gb", "fp16"),
        ("cpu", "fp32"),
    ],
)
def test_what_is_not_in_the_table_has_no_published_peak(name, precision):
    assert published_flops(name, precision) is None
