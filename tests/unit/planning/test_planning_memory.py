"""Memory of a rank: activations against what autograd keeps, shapes against all there are, the whole against properties."""

import importlib
import itertools
import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from model_choices import CHOICES
from running import NOT_INHERITED, without

from dist_transformer.config.model_size import (
    count_by_part,
    has_bf16_layers,
    head_sizes,
    offloaded_bytes,
    state_bytes,
)
from dist_transformer.config.schema import Config
from dist_transformer.data.filters import RATIO_FREE_TOKENS, filter_lengths
from dist_transformer.model import loss as loss_module
from dist_transformer.model.transformer import Transformer
from dist_transformer.planning import activations as plan_activations
from dist_transformer.planning.activations import Shape, activations, largest_shape, token_bytes
from dist_transformer.planning.memory import memory_of_rank, memory_problem, most_tokens, with_tokens

VOCABULARY = 56
BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "memory_plan.py"
SMALL_MODEL = dict(d_model=32, d_ff=80, num_heads=4, num_encoder_layers=2, num_decoder_layers=3)

ODD_HEADS = dict(num_heads=3, key_size=20, value_size=20)
"""Nothing of it divides d_model."""

LINEAR = torch.nn.functional.linear


@pytest.fixture(autouse=True)
def torchs_own_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's stage 3 leaves its own in the place of it, for the rest of the process."""
    monkeypatch.setattr(torch.nn.functional, "linear", LINEAR)


def config_of(model=None, data=None, **training):
    return Config.model_validate({"data": data or {}, "model": model or {"preset": "base"}, "training": training})


def kept_by_autograd(config, shape):
    """Bytes of all different storages that a forward pass saves, without the parameters, and those of bf16 weights."""
    model = Transformer(
        config.model, VOCABULARY, VOCABULARY, 0, activation_checkpointing=config.training.activation_checkpointing
    )
    precision = config.training.precision
    is_autocast = precision == "bf16" and not has_bf16_layers(config.training)
    model = (model.half() if precision == "fp16" else model).train()
    if has_bf16_layers(config.training):
        model.round_layers(torch.bfloat16)
    sides = {p.shape for p in model.parameters() if p.dim() == 2} | {
        p.T.shape for p in model.parameters() if p.dim() == 2
    }
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    source, target = (torch.full((shape.rows, length), 5) for length in shape[1:])
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_autocast),
    ):
        model.loss(source, target, target, 0.1)
    tensors = [tensor for place, tensor in saved.items() if place not in parameters]
    weights = [t for t in tensors if t.dtype == torch.bfloat16 and t.shape in sides]
    total, copies = (sum(t.untyped_storage().nbytes() for t in some) for some in (tensors, weights))
    return total - copies, copies


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 1), ("bf16", 0), ("bf16", 1), ("fp16", 1)])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize(
    "model",
    [
        dict(dropout=0.0),
        dict(dropout=0.1),
        ODD_HEADS,
        *CHOICES,
        dict(final_norm=True),
        dict(final_norm=False),
        dict(layer_drop=0.2),
        dict(output_bias=True),
    ],
    ids=str,
)
def test_the_activations_are_those_that_autograd_keeps(precision, stage, norm, model):
    config = config_of({**SMALL_MODEL, "norm": norm, **model}, precision=precision, zero_stage=stage)
    shape = Shape(5, 11, 23)
    found = activations(config, VOCABULARY, shape, on_gpu=False)
    kept, copies = kept_by_autograd(config, shape)
    rotations = 0  # a complex number for each position and pair: the same for any number of rows
    if config.model.positions == "rotary":
        layers = config.model.num_encoder_layers, config.model.num_decoder_layers
        positions = layers[0] * shape.source_length + layers[1] * shape.target_length
        rotations = positions * head_sizes(config.model)[0] // 2 * 8
    assert found.kept == pytest.approx(kept - rotations, rel=0.005)
    assert found.weight_copies == copies


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, dict(norm="pre"), dict(final_norm=True, norm_type="rms")], ids=str)
def test_with_checkpointing_the_activations_are_the_inputs_of_layers(model):
    config = config_of({**SMALL_MODEL, **model}, activation_checkpointing=True, precision="fp32")
    shape = Shape(5, 11, 23)
    found = activations(config, VOCABULARY, shape, on_gpu=False)
    assert found.kept == pytest.approx(kept_by_autograd(config, shape)[0], rel=0.01)


class KernelLikeThoseOfGpus(torch.autograd.Function):
    """Keeps what flash attention keeps, for values of any size: on CPUs torch's keeps the weights where sizes differ."""

    @staticmethod
    def forward(ctx, query, key, value):
        batch, heads, length, _ = query.shape
        attended = query.new_zeros(batch, length, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, attended, query.new_zeros(batch, heads, length, dtype=torch.float32))
        return attended


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 1), ("bf16", 0), ("bf16", 1)])
@pytest.mark.parametrize(("key_size", "value_size"), [(3, 16), (20, 5)])
def test_keys_and_values_may_be_of_different_sizes(monkeypatch, precision, stage, key_size, value_size):
    sizes = {**SMALL_MODEL, "key_size": key_size, "value_size": value_size}
    config = config_of(sizes, precision=precision, zero_stage=stage)
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention",
        lambda *inputs, **_: KernelLikeThoseOfGpus.apply(*inputs[:3]),
    )
    found = activations(config, VOCABULARY, Shape(5, 11, 23), on_gpu=False)
    kept, copies = kept_by_autograd(config, Shape(5, 11, 23))
    assert found.kept == pytest.approx(kept, rel=0.005)
    assert found.weight_copies == copies


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_stage_3_keeps_no_copies_in_bf16(monkeypatch, norm):
    """Its linear layer is DeepSpeed's."""
    importlib.import_module("dist_transformer.training.engine.engine")
    linear = importlib.import_module("deepspeed.runtime.zero.linear").zero3_linear_wrap
    monkeypatch.setattr("torch.nn.functional.linear", linear)
    config = config_of({**SMALL_MODEL, "norm": norm}, precision="bf16", zero_stage=3)
    found = activations(config, VOCABULARY, Shape(5, 11, 23), on_gpu=False)
    assert found.kept == pytest.approx(kept_by_autograd(config, Shape(5, 11, 23))[0], rel=0.005)
    assert found.weight_copies == 0


def test_masks_of_dropout_are_a_byte_and_cpus_attend_in_fp32():
    with_dropout, without = (token_bytes(config_of({**SMALL_MODEL, "dropout": p}), on_gpu=False) for p in (0.1, 0.0))
    d_model, encoder, decoder = 32, 2, 3
    assert with_dropout[0] - without[0] == d_model * (2 * encoder + 1)
    assert with_dropout[1] - without[1] == d_model * (3 * decoder + 1)
    config = config_of(SMALL_MODEL, precision="bf16")
    on_cpu, on_gpu = (token_bytes(config, on_gpu=where) for where in (False, True))
    assert on_cpu[0] - on_gpu[0] == encoder * d_model * (4 * 2 + 2) + decoder * d_model * 2 * 2
    assert on_cpu[1] - on_gpu[1] == decoder * d_model * (6 * 2 + 2 * 2)


def test_the_paper_s_models_are_as_large_as_the_paper_says():
    """Table 3: 65 million and 213 million parameters."""
    for preset, millions in (("base", 65), ("big", 213)):
        assert count_by_part(config_of({"preset": preset}).model, 37_000, 37_000).total / 1e6 == pytest.approx(
            millions, rel=0.035
        )


def test_what_is_said_twice_is_the_same():
    """planning/ may not import these floors."""
    assert plan_activations.CHUNK_TOKENS == loss_module.CHUNK_TOKENS
    assert plan_activations.CPU_CHUNK_TOKENS == loss_module.CPU_CHUNK_TOKENS
    assert plan_activations.RATIO_FREE_TOKENS == RATIO_FREE_TOKENS


@pytest.mark.parametrize(("longest", "ratio", "budget"), [(40, 9.0, 500), (33, 1.5, 300), (12, 3.0, 100)])
@pytest.mark.parametrize("weights", [(1, 1), (2, 5), (7, 3)])
def test_the_largest_shape_is_the_largest_of_all_that_pass_the_filters(longest, ratio, budget, weights):
    filters = {"max_tokens": longest, "max_length_ratio": ratio}
    data = config_of(data={"filters": filters, "max_tokens": budget}).data

    def size(rows, source, target):
        return rows * (source * weights[0] + target * weights[1])

    pairs = list(itertools.product(range(1, longest + 1), repeat=2))
    kept = ~np.logical_or.reduce([*filter_lengths(*zip(*pairs, strict=True), data.filters).values()])
    sizes = [size(budget // (s + t), s, t) for (s, t), is_kept in zip(pairs, kept, strict=True) if is_kept]
    found = largest_shape(data, budget, *weights)
    assert found.rows * (found.source_length + found.target_length) <= budget
    assert size(*found) == max(sizes)


def test_the_largest_shape_of_long_sentences_takes_memory_by_their_length_and_not_its_square():
    data = config_of(data={"filters": {"max_tokens": 4096}, "max_tokens": 2**31 - 1}).data
    tracemalloc.start()
    shape = largest_shape(data, data.token_budget(), 10**9, 10**9)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shape.rows >= 2**31 // (2 * 4096) - 1
    assert peak_bytes < 1000 * 4096


ALL_KINDS = [
    dict(zero_stage=stage, precision=precision) for stage in range(4) for precision in ("fp32", "bf16", "fp16")
] + [dict(zero_stage=1, offload="optimizer"), dict(zero_stage=3, offload="optimizer_and_parameters", ema_decay=0.9)]


@pytest.mark.parametrize("kind", ALL_KINDS, ids=str)
def test_more_ranks_never_need_more_memory_of_a_rank_and_more_tokens_never_less(kind):
    config = config_of(data={"lanes": 64}, **kind)
    # Of stage 3, one rank alone gathers nothing.
    numbers = [n for n in (1, 2, 3, 4, 8, 64) if n > 1 or kind["zero_stage"] < 3]
    peaks = [memory_of_rank(config, num_ranks).peak_bytes for num_ranks in numbers]
    assert peaks == sorted(peaks, reverse=True)
    by_tokens = [memory_of_rank(with_tokens(config, tokens), 4).peak_bytes for tokens in (512, 2048, 8192, 65_536)]
    assert by_tokens == sorted(by_tokens)
    assert by_tokens[0] < by_tokens[-1]


@pytest.mark.parametrize("kind", ALL_KINDS, ids=str)
def test_checkpointing_never_needs_more_and_a_rank_never_less_than_its_state(kind):
    config, saving = (config_of(activation_checkpointing=on, **kind) for on in (False, True))
    for tokens in (1024, 16_384):
        plain, less = (memory_of_rank(with_tokens(c, tokens), 4).peak_bytes for c in (config, saving))
        assert less <= plain
    parameters = count_by_part(config.model, 37_000, 37_000)
    assert memory_of_rank(config, 4).peak_bytes >= 0.8 * state_bytes(parameters, config.training, 4)
    assert memory_of_rank(config, 4).cpu_bytes >= offloaded_bytes(parameters.total, config.training, 4)


def test_each_higher_stage_divides_more_of_the_state_among_many_ranks():
    parts = [memory_of_rank(config_of(zero_stage=stage, precision="fp16"), 8).parts for stage in range(4)]
    for part, first_divided in (("optimizer", 1), ("gradients", 2), ("weights", 3)):
        shares = [parts[stage][part] / parts[0][part] for stage in range(4)]
        shares[3] *= 2 if part == "gradients" else 1  # stage 3 sums them in 16 bits, the others in 32
        assert shares == pytest.approx([1.0] * first_divided + [1 / 8] * (4 - first_divided), rel=1e-3)


@pytest.mark.parametrize(("stage", "parts"), [(0, 0.0), (1, 0.25), (2, 0.5)])
def test_what_is_on_the_way_to_other_ranks_takes_memory(stage, parts):
    """A quarter of the gradients at most: in stage 1 what others send, in stage 2 what is sent, too."""
    config = config_of(zero_stage=stage, precision="fp32")
    alone, of_two = (memory_of_rank(config, num_ranks).parts["reduce_buffer"] for num_ranks in (1, 2))
    assert alone == 0
    assert of_two == pytest.approx(parts * 4 * count_by_part(config.model, 37_000, 37_000).total, abs=1)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sums_of_gradients_in_fixed_point_take_twice_the_memory(stage):
    plain, same_bits = (
        memory_of_rank(config_of(zero_stage=stage, precision="fp32", same_bits=given), 2).parts
        for given in (False, True)
    )
    for part in ("gradients", "reduce_buffer"):
        assert same_bits[part] == pytest.approx(2 * plain[part], abs=1)


def test_the_most_tokens_fit_and_256_more_do_not():
    config, limit = config_of(data={"max_tokens": "auto"}), 6e9
    tokens = most_tokens(config, 2, limit)
    assert tokens % 256 == 0
    assert memory_of_rank(with_tokens(config, tokens), 2).peak_bytes <= limit
    assert memory_of_rank(with_tokens(config, tokens + 256), 2).peak_bytes > limit
    assert most_tokens(config, 2, 1e6) == 0


@pytest.mark.parametrize("memory_gb", [5.0, 3.0, 2.4, 1.9, 1.5])
def test_a_run_that_does_not_fit_is_told_a_change_with_which_it_does(memory_gb):
    config = config_of(data={"max_tokens": 32_768}, precision="fp16")
    problem = memory_problem(config, 4, memory_gb)
    assert problem is not None
    assert f"of the GPU's {memory_gb:g} GB" in problem
    assert "it fits with" in problem
    changed = config.model_dump()
    keys = re.findall(r"\S+(?==)", problem.split("it fits with ")[1])
    assert len(keys) == len(set(keys))
    for setting in problem.split("it fits with ")[1].split():
        key, _, value = setting.partition("=")
        section, _, name = key.partition(".")
        changed[section][name] = json.loads(value) if value[0].isdigit() or value in ("true", "false") else value
    assert memory_problem(Config.model_validate(changed), 4, memory_gb) is None


def test_a_run_that_fits_has_no_problem_and_one_that_never_can_is_told_so():
    assert memory_problem(config_of(), 4, 80.0) is None
    assert memory_problem(config_of(data={"max_tokens": "auto"}), 4, 80.0) is None
    for tokens in (8192, "auto"):
        problem = memory_problem(config_of(data={"max_tokens": tokens}), 4, 0.1)
        assert problem is not None
        assert "take a smaller model or GPUs of more memory" in problem


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "cases"), [(1, "0,3,7,9,12"), (2, "13,14")])
def test_the_plan_is_within_a_tenth_of_what_a_real_step_takes(tmp_path, num_ranks, cases):
    """On two ranks stage 2 in fp16 and stage 3 in fp32."""
    raw = tmp_path / "memory.json"
    command = [sys.executable, str(BENCHMARK), "--ranks", str(num_ranks), "--cases", cases, "--json", str(raw)]
    environment = {**without(NOT_INHERITED), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads(raw.read_text(encoding="utf-8"))["figures"]["memory"]
    assert len(figures) == len(cases.split(","))
    for name, case in figures.items():
        assert case["planned"] == pytest.approx(case["measured"], rel=0.1), name
        planned, measured = case["moments"]
        assert planned["forward"] == pytest.approx(measured["forward"], rel=0.1), name
        assert planned["update"] == pytest.approx(measured["update"], rel=0.1), name
        # The plan looks at the beginning and the end of the backward pass.
        backward = max(planned["backward"], planned["gradients"])
        assert backward == pytest.approx(measured["backward"], rel=0.1), name
