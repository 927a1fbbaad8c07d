"""The largest micro-batch: no real one exceeds it, a dry run of it changes nothing, and `auto` finds one that fits."""

import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_torch import TINY, VOCABULARY
from running import NOT_INHERITED

from dist_transformer.config.data_schema import DataConfig
from dist_transformer.config.schema import TrainingConfig
from dist_transformer.data.filters import filter_lengths
from dist_transformer.data.loader.batching import buckets_of
from dist_transformer.errors import UserError
from dist_transformer.model.transformer import Transformer
from dist_transformer.planning.activations import Shape
from dist_transformer.training import batch_size_finder
from dist_transformer.training.batch_size_finder import (
    AUTO_MAX_TOKENS,
    AUTO_MULTIPLE_TOKENS,
    SLOW_SECONDS,
    Growth,
    dry_run,
    find_max_tokens,
    grow,
    largest_shapes,
)
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective
from dist_transformer.training.memory import Allowance


def data_of(max_tokens=512, longest=40, ratio=9.0):
    filters = {"max_tokens": longest, "max_length_ratio": ratio}
    return DataConfig(train={"demo": "train"}, max_tokens=max_tokens, filters=filters)


MEASURES = {
    "attention over source and target": lambda rows, source, target: rows * source * target,
    "all attention": lambda rows, source, target: rows * (source**2 + source * target + target**2),
    "target tokens": lambda rows, source, target: rows * target,
    "source tokens": lambda rows, source, target: rows * source,
    "tokens": lambda rows, source, target: rows * (source + target),
}


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=150),
    st.integers(80, 900),
    st.sampled_from([1.5, 3.0, 9.0]),
)
def test_no_batch_of_any_rows_is_larger_than_the_largest_of_these_shapes(lengths, budget, ratio):
    data = data_of(budget, 40, ratio)
    source, target = np.array(lengths).T
    kept = ~np.logical_or.reduce([*filter_lengths(source, target, data.filters).values()])
    source, target, order = source[kept], target[kept], np.arange(int(kept.sum()))
    buckets = buckets_of(source, target, order, budget)
    shapes = largest_shapes(data)
    for name, size in MEASURES.items():
        largest = max(size(*shape) for shape in shapes)
        assert all(size(*bucket[1:]) <= largest for bucket in buckets), name


@pytest.mark.parametrize("budget", [80, 512, 5000])
def test_each_of_the_shapes_is_one_that_the_batching_makes(budget):
    for shape in largest_shapes(data_of(budget, 40)):
        source, target = (np.full(shape.rows, length) for length in (shape.source_length, shape.target_length))
        (bucket,) = buckets_of(source, target, np.arange(shape.rows), budget)
        assert bucket[1:] == shape


def test_both_sides_at_their_longest_are_among_the_shapes_and_so_are_very_unequal_ones():
    shapes = largest_shapes(data_of(4096, 64, 9.0))
    assert Shape(32, 64, 64) in shapes
    assert max(shape.target_length / shape.source_length for shape in shapes) > 7
    assert max(shape.source_length / shape.target_length for shape in shapes) > 7


class FakeEngine:
    """An objective that is called as an engine is, and remembers what it was given."""

    def __init__(self, objective):
        self.objective, self.shapes = objective, []

    def train(self):
        self.objective.train()

    def __call__(self, source, target_in, target_out, num_targets, shapes):
        ((rows, source_length, target_length, *tokens),) = shapes
        assert tokens == [rows * source_length, rows * target_length] == [len(source), num_targets]
        assert len(target_in) == len(target_out) == num_targets
        assert source.all()
        assert target_out.all()
        self.shapes.append(Shape(rows, source_length, target_length))
        return self.objective(source, target_in, target_out, num_targets, shapes)

    def backward(self, loss, tokens):
        (loss / tokens).backward()


def objective_of(seed=1):
    torch.manual_seed(seed)
    return Objective(Transformer(TINY, VOCABULARY, VOCABULARY, 0), 0.1, "fp32")


def gradients_of(engine_or_module):
    return {name: p.grad for name, p in engine_or_module.named_parameters() if p.grad is not None}


def test_a_dry_run_computes_every_shape_without_padding_and_leaves_gradients_of_exactly_zero(ranks):
    engine, said = FakeEngine(objective_of()), []
    shapes = [Shape(3, 5, 7), Shape(2, 9, 4)]
    dry_run(engine, shapes, ranks, 2, said.append)
    assert engine.shapes == shapes
    gradients = gradients_of(engine.objective)
    assert set(gradients) == {name for name, _ in engine.objective.named_parameters()}
    assert all(not gradient.any() for gradient in gradients.values())
    assert all(any(str(shape) in text for text in said) for shape in shapes)


def test_a_loss_that_is_not_finite_leaves_no_gradient_at_all(ranks, caplog):
    engine = FakeEngine(objective_of())
    with torch.no_grad():
        engine.objective.model.source_embedding.weight[2] = float("inf")
    dry_run(engine, [Shape(3, 5, 7)], ranks, 2, print)
    assert gradients_of(engine.objective) == {}
    assert "not finite" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero_stage", "precision"),
    [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (1, "fp16"), (2, "fp16"), (3, "fp16")],
)
def test_training_is_the_same_with_and_without_a_dry_run(make_engine, batches, ranks, zero_stage, precision):
    def train(is_tried):
        engine, losses = make_engine(zero_stage=zero_stage, precision=precision), []
        if is_tried:
            dry_run(engine, [Shape(3, 5, 7), Shape(9, 12, 4)], ranks, 2, print)
        for number, batch in enumerate(batches[:4]):
            torch.manual_seed(number)
            loss, _ = engine(*batch)
            engine.backward(loss, 20)
            engine.step(1e-2)
            losses.append((float(loss.detach()), engine.gradient_norm(), engine.loss_scale()))
        return losses

    assert train(True) == train(False)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_dry_run_whose_loss_is_not_finite_leaves_training_as_it_is(
    make_engine, batches, ranks, zero_stage, monkeypatch
):
    call, found = Engine.__call__, []
    for is_tried in (True, False):
        engine = make_engine(zero_stage=zero_stage, precision="fp32")
        if is_tried:
            monkeypatch.setattr(Engine, "__call__", lambda *inputs: tuple(x * float("inf") for x in call(*inputs)))
            dry_run(engine, [Shape(3, 5, 7)], ranks, 2, print)
            monkeypatch.setattr(Engine, "__call__", call)
        torch.manual_seed(1)
        engine.backward(engine(*batches[1])[0], 20)
        engine.step(1e-2)
        found.append((engine.gradient_norm(), float(engine(*batches[1])[0].detach())))
    assert found[0] == found[1]


def line(constant, per_token, seconds=0.0, most=2**60):
    """A device that needs `constant` + `per_token` x tokens bytes, and is out of memory above `most`."""

    def measure(tokens):
        in_use = constant + per_token * tokens
        tried.append(tokens)
        return (in_use, seconds) if in_use <= most else None

    tried = []
    return measure, tried


@given(st.integers(0, 10**8), st.integers(1, 10**5), st.integers(16, 512), st.integers(10**6, 10**10))
def test_what_is_found_fits_and_uses_at_least_half_of_the_limit(constant, per_token, smallest, limit):
    measure, tried = line(constant, per_token)
    tokens = grow(smallest, measure, limit, False).most_tokens(limit)
    assert max(tried) <= AUTO_MAX_TOKENS
    assert all(constant + per_token * size <= limit for size in tried[1:])  # none was tried that could not fit
    if constant + per_token * smallest > limit:
        assert tokens == 0
        return
    assert constant + per_token * tokens <= limit
    assert tokens == smallest or tokens % AUTO_MULTIPLE_TOKENS == 0
    reached = tokens + AUTO_MULTIPLE_TOKENS
    assert reached > AUTO_MAX_TOKENS or constant + per_token * reached > limit / 2


@given(st.integers(0, 10**7), st.integers(1, 10**4), st.integers(10**6, 10**9), st.integers(0, 10**9))
def test_more_memory_never_gives_less(constant, per_token, limit, more):
    found = [
        grow(256, line(constant, per_token)[0], bound, False).most_tokens(bound) for bound in (limit, limit + more)
    ]
    assert found[0] <= found[1]


def test_out_of_memory_below_what_was_expected_bounds_the_answer():
    measure, tried = line(0, 1000, most=5_000_000)
    growth = grow(256, measure, 10**9, False)
    assert tried[-1] == growth.too_large
    assert 1000 * growth.most_tokens(10**9) < 1000 * growth.too_large
    assert growth.most_tokens(10**9) >= tried[-2]


def test_on_a_cpu_a_slow_pass_ends_the_search_and_on_a_gpu_it_does_not():
    measure, tried = line(0, 1, seconds=SLOW_SECONDS * 1.01)
    assert grow(512, measure, 10**9, may_be_slow=True).most_tokens(10**9) == 512
    assert tried == [512]
    assert grow(512, line(0, 1, seconds=SLOW_SECONDS * 1.01)[0], 10**9, may_be_slow=False).most_tokens(10**9) == (
        AUTO_MAX_TOKENS
    )


def test_sizes_that_reuse_memory_do_not_count_as_free():
    growth = Growth(256, ((256, 1_000_000), (512, 1_000_000)))
    assert growth.most_tokens(2_000_000) < AUTO_MAX_TOKENS


@pytest.fixture
def little_memory(monkeypatch):
    """A limit of 60 MB, whatever else this machine does meanwhile."""
    monkeypatch.setattr(batch_size_finder.memory, "allowance", lambda ranks: Allowance(60_000_000, "a limit"))


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory")
def test_the_search_leaves_weights_and_gradients_as_they_were_and_says_what_it_found(ranks, caplog):
    objective = objective_of()
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    caplog.set_level("INFO", "dist_transformer")
    found = find_max_tokens(objective, 0, data_of("auto", 16), ranks, TrainingConfig(precision="fp32"))
    assert found >= 32
    assert f"{found:,} found" in caplog.text
    assert gradients_of(objective) == {}
    assert all(torch.equal(value, before[name]) for name, value in objective.state_dict().items())
    assert pickle.dumps(found) == pickle.dumps(int(found))  # a plain number: it goes into JSON


def failing_above(most_tokens, error):
    """An objective whose products fail as a GPU's do that has no memory left beside torch's allocator."""

    class Failing(Objective):
        def forward(self, source, *others):
            if source.numel() > most_tokens:
                raise error
            return super().forward(source, *others)

    torch.manual_seed(1)
    return Failing(Transformer(TINY, VOCABULARY, VOCABULARY, 0), 0.1, "fp32")


OUT_OF_MEMORY = torch.AcceleratorError("CUDA error: out of memory")


@pytest.mark.slow
def test_the_search_takes_a_library_that_is_out_of_memory_for_too_large_a_size(ranks):
    found = find_max_tokens(
        failing_above(600, OUT_OF_MEMORY), 0, data_of("auto", 16), ranks, TrainingConfig(precision="fp32")
    )
    assert 32 <= found < 2048


def test_a_device_that_is_out_of_memory_for_good_ends_the_search_with_advice(ranks, monkeypatch):
    def broken(device):
        raise OUT_OF_MEMORY

    monkeypatch.setattr(batch_size_finder.memory, "give_back", broken)
    with pytest.raises(UserError, match=r"^out of memory in the search for the largest data\.max_tokens"):
        find_max_tokens(
            failing_above(600, OUT_OF_MEMORY), 0, data_of("auto", 16), ranks, TrainingConfig(precision="fp32")
        )


def test_a_state_larger_than_memory_is_refused_with_the_sizes_and_the_ways_out(ranks):
    with pytest.raises(UserError) as raised:
        find_max_tokens(objective_of(), 10**15, data_of("auto", 16), ranks, TrainingConfig(precision="fp32"))
    assert raised.value.is_agreed
    for words in ("data.filters.max_tokens = 16", "1,000,000.0 GB of them", "training.zero_stage"):
        assert words in str(raised.value)


def test_a_limit_on_addresses_that_libraries_alone_exceed_is_refused_with_the_way_out(ranks, monkeypatch):
    left = [Allowance(500_000_000, "ulimit -v")]
    monkeypatch.setattr(batch_size_finder.memory, "_left_to_process", lambda: left)
    said = r"fits into the 0 MB \(ulimit -v\) that .* Raise ulimit -v, of which 1\.5 GB are kept for addresses .*, or lower"
    with pytest.raises(UserError, match=said):
        find_max_tokens(objective_of(), 10**9, data_of("auto", 16), ranks, TrainingConfig(precision="fp32"))


LIMITED = """
    import logging, resource, sys
    import torch
    from dist_transformer.distributed import group
    from dist_transformer.config.data_schema import DataConfig
    from dist_transformer.config.schema import ModelConfig, TrainingConfig
    from dist_transformer.errors import UserError
    from dist_transformer.model.transformer import Transformer
    from dist_transformer.training import batch_size_finder, memory
    from dist_transformer.training.engine.objective import Objective

    memory.RESERVED_ADDRESS_BYTES = 0  # no corpus is read here
    torch.set_num_threads(1)
    torch.manual_seed(1)
    sizes = dict(d_model=64, d_ff=256, num_heads=4, num_encoder_layers=2, num_decoder_layers=2)
    model = Transformer(ModelConfig(**sizes), 400, 400, 0)
    objective = Objective(model, 0.1, "fp32")
    ranks = group.join(60)
    state_bytes = 20 * sum(p.numel() for p in model.parameters())

    class Plain:
        train, __call__ = objective.train, lambda self, *inputs: objective(*inputs)
        backward = lambda self, loss, tokens: loss.backward()

    def data_of(max_tokens):
        return DataConfig(train={"demo": "train"}, max_tokens=max_tokens, filters={"max_tokens": 64})

    def fits(max_tokens):
        try:
            batch_size_finder.dry_run(Plain(), batch_size_finder.largest_shapes(data_of(max_tokens)), ranks, 2, lambda text: None)
            return True
        except UserError as error:
            print(error, file=sys.stderr)
            return False

    fits(256)  # libraries are loaded and threads started
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + int(sys.argv[1]),) * 2)
    found = batch_size_finder.find_max_tokens(objective, state_bytes, data_of("auto"), ranks, TrainingConfig(precision="fp32"))
    print(found, fits(found), fits(2 * found))
    group.leave()
"""


def limited(most_bytes):
    """(found, whether it fits, whether twice as much fits, stderr) of a process with so much address space left.

    Each tensor has a mapping of its own (mallopt(3)), as those above 32 MB, which fill memory in real training, always
    have: else the holes between the small tensors here take what is free, differently in each run.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(most_bytes)],
        env={name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found, fits, twice_fits = done.stdout.split()
    return int(found), fits == "True", twice_fits == "True", done.stderr


@pytest.mark.slow
def test_under_a_real_limit_what_is_found_fits_twice_as_much_does_not_and_more_memory_finds_more():
    found, fits, twice_fits, said = limited(150_000_000)
    assert (fits, twice_fits) == (True, False)
    assert f"out of memory in the dry run of the largest micro-batch, {2 * found // 128} x (64 + 64) tokens" in said
    for words in ("more were asked for", "are in use by this rank", "(ulimit -v)", "data.max_tokens"):
        assert words in said
    larger, fits, twice_fits, _ = limited(300_000_000)
    assert (fits, twice_fits) == (True, False)
    assert 1.4 * found < larger < 3 * found
