"""The kernels for GPUs compute what torch does, in Triton's interpreter, which runs the same code on a CPU; or on the GPU that
DIST_TRANSFORMER_TEST_GPUS names, as `benchmarks/gpu.py --acceptance` does."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_joined_batches import batches_of, gradients, one_after_another, shapes_of
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.model import gpu_kernels, loss
from dist_transformer.model.attention import Joined
from dist_transformer.model.transformer import JoinedShape, Transformer

TRITON = Path(sys.prefix) / "triton"
"""Installed by the Makefile, not beside torch and DeepSpeed: each start of a rank would import it."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = {torch.float16: 1e-3, torch.float32: 5e-3 if DEVICE.type == "cuda" else 1e-6}
ERROR |= {torch.bfloat16: 8e-3} if DEVICE.type == "cuda" else {}
"""Largest error of a result relative to fp64: the rounding of its type, in products on GPUs of TF32. The interpreter has no
bf16."""
dtypes = pytest.mark.parametrize("dtype", ERROR)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ModuleType]:
    """Triton's kernels, interpreted."""
    with pytest.MonkeyPatch.context() as patch, DEVICE:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            patch.syspath_prepend(str(TRITON))
        yield importlib.import_module("dist_transformer.model.triton_kernels")
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" or name.endswith(".triton_kernels")]:
        del sys.modules[name]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def starts_of(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def attend_one_by_one(q: Tensor, k: Tensor, v: Tensor, starts: list[Tensor], heads: int, is_causal: bool) -> Tensor:
    rows = []
    for a, b, c, d in zip(starts[0], starts[0][1:], starts[1], starts[1][1:], strict=False):
        of_row = [part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in (q[a:b], k[c:d], v[c:d])]
        rows.append(F.scaled_dot_product_attention(*of_row, is_causal=is_causal).transpose(0, 1).flatten(1))
    return torch.cat(rows)


@pytest.mark.slow
@dtypes
@pytest.mark.parametrize("blocks", [(16, 16), (32, 32), (64, 32), (128, 128)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.usefixtures("interpreter")
def test_attention_of_rows_end_to_end_is_that_of_each_row(
    dtype: torch.dtype, blocks: tuple[int, int], is_causal: bool
) -> None:
    queries = [5, 1, 13, min(blocks) if is_causal else blocks[0]]
    keys, heads, width = (queries if is_causal else [3, 15, 1, blocks[1]]), 2, 32
    given = [torch.randn(sum(queries), 3 * width if is_causal else width)]
    given += [] if is_causal else [torch.randn(sum(keys), 2 * width)]
    ours = [each.to(dtype).requires_grad_() for each in given]
    exact = [each.detach().double().requires_grad_() for each in ours]
    starts, others = [starts_of(queries), starts_of(keys)], [None] * is_causal
    sides = [Joined([(4, blocks[i])], torch.empty(0), torch.empty(0), starts[i], []) for i in (1, 0)]
    given = [each if each is None else each[None] for each in (*ours, *others)]
    found = gpu_kernels.attend_rows(*given, *sides, heads, is_causal)[0]
    expected = attend_one_by_one(*gpu_kernels.parts_of(*exact, *others), starts, heads, is_causal)
    gradient = torch.randn(expected.shape).to(dtype)
    found_gradients = torch.autograd.grad(found, ours, gradient)
    expected_gradients = torch.autograd.grad(expected, exact, gradient.double())
    assert distance(found, expected) < ERROR[dtype]
    for one, other in zip(found_gradients, expected_gradients, strict=True):
        assert distance(one, other) < ERROR[dtype]


@dtypes
@pytest.mark.usefixtures("interpreter")
def test_sum_and_norm_are_torchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "NORM_PROGRAMS", 4)  # several tokens in each
    ours, exact = nn.LayerNorm(24).to(dtype), nn.LayerNorm(24).double()
    for parameter, other in zip(ours.parameters(), exact.parameters(), strict=True):
        other.data.copy_(parameter.data.normal_())
    x, y = (torch.randn(1, 11, 24).to(dtype).requires_grad_() for _ in range(2))
    wide_x, wide_y = (each.detach().double().requires_grad_() for each in (x, y))
    found, expected = gpu_kernels.add_and_norm(x, y, ours), exact(wide_x + wide_y)
    gradient = torch.randn(found.shape).to(dtype)
    found_gradients = torch.autograd.grad(found, [x, y, *ours.parameters()], gradient)
    expected_gradients = torch.autograd.grad(expected, [wide_x, wide_y, *exact.parameters()], gradient.double())
    for one, other in zip((found, *found_gradients), (expected, *expected_gradients), strict=True):
        assert distance(one, other) < ERROR[dtype]


@dtypes
@pytest.mark.parametrize("pieces", [37, 5000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.usefixtures("interpreter")
def test_the_gradient_of_logits_is_that_in_place(dtype: torch.dtype, pieces: int, smoothing: float) -> None:
    logits, target, mean_logit = 5 * torch.randn(7, pieces), torch.randint(4, pieces, (7,)), torch.randn(7)
    if not smoothing:
        logits[:, 3] = -torch.inf  # a piece may be impossible
    about = target, mean_logit, smoothing, 4096.0, dtype
    found, expected = gpu_kernels.gradient_of_logits(logits, *about), loss.gradient_in_place(logits.clone(), *about)
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other.double()) < ERROR[dtype]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
def test_the_model_has_the_same_gradients_with_the_kernels(
    make_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = make_model(d_model=32, num_heads=2).train(), batches_of([(3, 5, 7), (1, 9, 2)])
    given = *one_after_another(batches), 0.1, None, shapes_of(batches)
    expected_loss, _ = model.loss(*given)
    expected = gradients(model, expected_loss)
    used = []
    for name in ("can_attend", "can_norm"):
        monkeypatch.setattr(gpu_kernels, name, lambda *_, name=name: used.append(name) or True)
    found, _ = model.loss(*given)
    assert set(used) == {"can_attend", "can_norm"}
    for name, gradient in gradients(model, found).items():
        assert distance(gradient, expected[name]) < 10 * ERROR[torch.float32], name
    torch.testing.assert_close(found, expected_loss, rtol=ERROR[torch.float32], atol=0)


def test_where_no_kernel_runs_torchs_own_are_taken_and_a_warning_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "dist_transformer.model.triton_kernels", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    gpu_kernels.run_here.cache_clear()
    assert not gpu_kernels.has_kernels()
    assert "Triton needs a C compiler and Python's headers" in caplog.text
    gpu_kernels.run_here.cache_clear()


def test_triton_compiles_nothing_for_gpus_for_which_it_takes_minutes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(gpu_kernels, "try_kernels", lambda _: pytest.fail("compiled"))
    gpu_kernels.run_here.cache_clear()
    assert not gpu_kernels.has_kernels()
    assert "ours need compute capability 8.0" in caplog.text
    gpu_kernels.run_here.cache_clear()


def test_on_gpus_a_batch_that_is_large_enough_is_computed_without_padding(
    make_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, on_gpu, on_cpu = make_model(), SimpleNamespace(is_cuda=True, device="cpu"), torch.empty(0)
    model.round_layers(torch.bfloat16)
    rows = gpu_kernels.LEAST_ELEMENTS // (2 * 8 * model.source_embedding.embedding_dim)
    large, small = [JoinedShape(rows, 8, 8, rows, rows)], [JoinedShape(rows - 1, 8, 8, rows, rows)]
    asked = []
    monkeypatch.setattr(
        gpu_kernels, "can_attend", lambda like, longest, *_: asked.append((like.dtype, longest)) or True
    )
    assert not model.is_padded(large, on_gpu)
    assert asked == [(torch.bfloat16, 8)]
    assert model.is_padded(small, on_gpu)
    assert model.is_padded(large, on_cpu)
    assert not model.is_padded(small * 2, on_cpu)
    assert make_model(positions="rotary").is_padded(large, on_gpu)
    monkeypatch.setattr(gpu_kernels, "can_attend", lambda *_: False)
    assert model.is_padded(large, on_gpu)


@pytest.mark.usefixtures("interpreter")
def test_all_kernels_are_tried_before_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    for name in ("_launch", "gradient_of_logits"):
        real = getattr(gpu_kernels, name)
        monkeypatch.setattr(gpu_kernels, name, lambda *about, real=real: tried.append(about[0]) or real(*about))
    gpu_kernels.try_kernels(DEVICE.type)
    assert tried[:2] == ["attend", "attend_backward"]
    assert len(tried) == 3


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_and_fit_their_shared_memory(tmp_path: Path) -> None:
    """Triton's compiler needs no GPU; in a process of its own, since here its kernels may be interpreted."""
    room_and_longest = {"80": (166_912, 128), "90": (232_448, 128), "86": (101_376, 64)}  # CUDA's programming guide
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([*sys.path, str(TRITON)]), "TRITON_CACHE_DIR": str(tmp_path)}
    for room, longest in room_and_longest.values():
        assert longest == (gpu_kernels.LONGEST if room >= gpu_kernels.LARGEST_PROGRAM_BYTES else 64)
    script = [sys.executable, Path(__file__).with_name("compile_kernels.py")]
    about = [f"{capability}:{longest}" for capability, (_, longest) in room_and_longest.items()]
    done = subprocess.run([*script, *about], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for capability, shared in json.loads(done.stdout).items():
        assert set(shared) == {"attend", "attend_backward", "add_norm", "add_norm_backward", "gradient_of_logits"}
        assert max(shared.values()) <= room_and_longest[capability][0], capability
