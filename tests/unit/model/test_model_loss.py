"""The chunked loss against F.cross_entropy: values, gradients, precisions, and what it never holds."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dist_transformer.model import loss as loss_module
from dist_transformer.model.loss import label_smoothed_cross_entropy

NUM_TOKENS, D_MODEL, VOCABULARY, PAD = 23, 6, 11, 0


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(NUM_TOKENS, D_MODEL), torch.randn(VOCABULARY, D_MODEL)
    target = torch.randint(1, VOCABULARY, (NUM_TOKENS,))
    target[::4] = PAD
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


def reference(hidden: Tensor, weight: Tensor, target: Tensor, smoothing: float, pad_id: int | None = PAD) -> Tensor:
    ignored = -100 if pad_id is None else pad_id
    logits = hidden @ weight.T
    return F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="sum", ignore_index=ignored)


def gradients(value: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, (hidden, weight))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("pad_id", [None, PAD])
def test_loss_and_gradients_equal_cross_entropy(smoothing: float, pad_id: int | None) -> None:
    hidden, weight, target = inputs()
    ours, nll = label_smoothed_cross_entropy(hidden, weight, target, smoothing, pad_id)
    theirs = reference(hidden, weight, target, smoothing, pad_id)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(nll, reference(hidden, weight, target, 0.0, pad_id).detach())
    torch.testing.assert_close(gradients(3.5 * ours, hidden, weight), gradients(3.5 * theirs, hidden, weight))


@pytest.mark.parametrize("chunk", [1, 4, 16, 17, 18, 1000])
def test_chunk_boundaries_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """17 of the 23 targets are real."""
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", chunk)
    hidden, weight, target = inputs()
    assert (target != PAD).sum() == 17
    ours, _ = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD)
    theirs = reference(hidden, weight, target, 0.1)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(ours, hidden, weight), gradients(theirs, hidden, weight))


def test_the_gradient_is_that_of_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", 4)
    hidden, weight, target = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: label_smoothed_cross_entropy(h, w, target, 0.1, PAD)[0], (hidden, weight)
    )


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("weight_is_trained", [True, False])
def test_loss_and_gradients_with_a_bias_equal_cross_entropy(
    chunk: int, weight_is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", chunk)
    hidden, weight, target = inputs()
    hidden, weight = (
        hidden.detach().requires_grad_(weight_is_trained),
        weight.detach().requires_grad_(weight_is_trained),
    )
    bias = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    ours, nll = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD, bias)
    logits = hidden @ weight.T + bias
    options = dict(ignore_index=PAD, reduction="sum")
    theirs = F.cross_entropy(logits, target, label_smoothing=0.1, **options)
    torch.testing.assert_close((ours, nll), (theirs, F.cross_entropy(logits, target, **options).detach()))
    trained = [hidden, weight, bias] if weight_is_trained else [bias]
    torch.testing.assert_close(torch.autograd.grad(3.5 * ours, trained), torch.autograd.grad(3.5 * theirs, trained))
    summed, _, hits = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD, bias, counts_hits=True)
    torch.testing.assert_close(summed, theirs.detach())
    assert hits == (logits.argmax(1) == target)[target != PAD].sum()


def test_without_smoothing_a_piece_may_be_impossible() -> None:
    hidden, weight, target = inputs()
    bias = torch.zeros(VOCABULARY, dtype=torch.float64)
    bias[3] = -torch.inf
    target[target == 3] = 4
    ours, nll = label_smoothed_cross_entropy(hidden, weight, target, 0.0, PAD, bias)
    theirs = F.cross_entropy(hidden @ weight.T + bias, target, ignore_index=PAD, reduction="sum")
    torch.testing.assert_close((ours, nll), (theirs, theirs.detach()))
    torch.testing.assert_close(gradients(ours, hidden, weight), gradients(theirs, hidden, weight))


def test_a_frozen_matrix_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target = inputs()
    trained, _ = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD)
    expected, _ = gradients(trained, hidden, weight)
    monkeypatch.setattr(loss_module, "_add_product", None)
    frozen, _ = label_smoothed_cross_entropy(hidden, weight.detach(), target, 0.1, PAD)
    assert torch.equal(torch.autograd.grad(frozen, hidden)[0], expected)


def test_a_batch_of_padding_alone_has_no_loss_and_no_gradient() -> None:
    hidden, weight, target = inputs()
    ours, nll = label_smoothed_cross_entropy(hidden, weight, torch.full_like(target, PAD), 0.1, PAD)
    assert ours.item() == nll.item() == 0.0
    assert not any(gradient.any() for gradient in gradients(ours, hidden, weight))


def test_logits_of_any_size_give_a_finite_loss() -> None:
    hidden, weight, target = inputs(torch.float32)
    ours, nll = label_smoothed_cross_entropy(hidden * 1e6, weight, target, 0.1, PAD)
    assert ours.isfinite()
    assert nll.isfinite()


def test_without_gradients_the_value_is_the_same_and_there_is_no_graph() -> None:
    hidden, weight, target = inputs()
    ours = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD)
    with torch.no_grad():
        quietly = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD)
    assert not quietly[0].requires_grad
    torch.testing.assert_close(quietly, tuple(value.detach() for value in ours))


def test_the_negative_log_likelihood_has_no_gradient() -> None:
    loss_sum, nll_sum = label_smoothed_cross_entropy(*inputs(), 0.1, PAD)
    assert loss_sum.requires_grad
    assert not nll_sum.requires_grad


@pytest.mark.parametrize("matmul_dtype", [torch.float32, torch.float16])
def test_fp16_input_gives_fp32_sums_and_gradients_that_do_not_underflow(
    matmul_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32: what CPUs do with fp16 input; float16: what GPUs do. The probabilities are near 1 / 20000: unscaled,
    smaller than fp16's normal numbers; a loss scale of 4096 comes in with the backward pass only."""
    monkeypatch.setattr(loss_module, "_matmul_dtype", lambda *_: matmul_dtype)
    hidden = (torch.randn(8, D_MODEL) * 0.5).half().requires_grad_()
    weight = (torch.randn(20_000, D_MODEL) * 0.5).half().requires_grad_()
    target = torch.randint(1, 20_000, (8,))
    ours, nll = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD)
    assert ours.dtype == nll.dtype == torch.float32
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    theirs = reference(exact_hidden, exact_weight, target, 0.1)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=0)
    for mine, other in zip(
        gradients(4096 * ours, hidden, weight), gradients(4096 * theirs, exact_hidden, exact_weight), strict=True
    ):
        assert mine.dtype == torch.float16
        assert (mine.double() - other).norm() < 2e-3 * other.norm()


def test_unlikely_words_keep_their_gradient_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probability of 1.5e-7 is two or three of fp16's smallest steps: just rounded, it is off by a fifth."""
    monkeypatch.setattr(loss_module, "_matmul_dtype", lambda *_: torch.float16)
    hidden = torch.full((1, 4), 0.125, dtype=torch.float16)
    weight = torch.tensor([0.0, 0.0, -30.0], dtype=torch.float16)[:, None].repeat(1, 4).requires_grad_()
    ours, _ = label_smoothed_cross_entropy(hidden, weight, torch.tensor([1]), 0.0)
    (gradient,) = torch.autograd.grad(65_536 * ours, weight)
    probability = torch.tensor([0.0, 0.0, -15.0], dtype=torch.float64).softmax(0)[2]
    expected = (65_536 * 0.125 * probability).expand(4)
    torch.testing.assert_close(gradient[2].double(), expected, rtol=0.01, atol=0)


def test_bf16_autocast_multiplies_in_bf16_and_sums_in_fp32() -> None:
    hidden, weight, target = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, _ = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD)
    logits = hidden.bfloat16() @ weight.bfloat16().T
    theirs = F.cross_entropy(logits.float(), target, label_smoothing=0.1, reduction="sum", ignore_index=PAD)
    assert ours.dtype == torch.float32
    # The mean of the logits is that of unrounded ones.
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=0)
    for mine, other in zip(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - other).norm() < 1e-2 * other.norm()


class LargestTensor(TorchDispatchMode):
    """Watches the number of elements of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_logits_of_all_tokens_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", 16)
    hidden = torch.randn(300, 4, requires_grad=True)
    weight = torch.randn(200, 4, requires_grad=True)
    with LargestTensor() as watched:
        ours, _ = label_smoothed_cross_entropy(hidden, weight, torch.randint(1, 200, (300,)), 0.1, PAD)
        ours.backward()
    assert watched.elements == 16 * 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sums_of_validation_are_those_of_training_and_hits_are_counted_over_all_chunks(dtype):
    torch.manual_seed(5)
    hidden, weight = torch.randn(2500, 8).to(dtype), torch.randn(40, 8).to(dtype)
    target = torch.randint(0, 40, (2500,))
    logits = hidden.double() @ weight.double().T
    target[::3] = logits.argmax(1)[::3]
    loss, nll, hits = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD, counts_hits=True)
    assert (loss, nll) == label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD)
    assert hits == ((logits.argmax(1) == target) & (target != PAD)).sum() > 800
    assert not loss.requires_grad
    padding = torch.full_like(target, PAD)
    assert label_smoothed_cross_entropy(hidden, weight, padding, 0.1, PAD, counts_hits=True) == (0, 0, 0)


def test_a_number_of_targets_that_is_known_changes_no_bit_and_a_wrong_one_is_an_error():
    hidden, weight, target = inputs()
    real, found = int((target != PAD).sum()), []
    for known in (None, real):
        loss, nll = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD, None, known)
        sums = label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD, None, known, True)
        found.append([loss, nll, *gradients(loss, hidden, weight), *sums])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with pytest.raises(IndexError, match="out of bounds"):
        label_smoothed_cross_entropy(hidden, weight, target, 0.1, PAD, None, real + 1)
