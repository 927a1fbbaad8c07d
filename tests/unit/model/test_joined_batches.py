"""Several batches computed as one have the loss and gradients of each alone, in every variant of the model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_model_variants import VARIANTS, VOCABULARY
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dist_transformer.model.attention import Joined
from dist_transformer.model.transformer import JoinedShape, Transformer

PAD = 0
SHAPES = [(3, 5, 7), (1, 9, 2), (4, 2, 8)]
MakeModel = Callable[..., Transformer]
Batch = tuple[Tensor, Tensor, Tensor]


def batches_of(shapes: list[tuple[int, int, int]]) -> list[Batch]:
    """(source, target in, target out) of each shape, with padding at the end of rows."""
    random = torch.Generator().manual_seed(4)

    def padded(rows: int, length: int) -> Tensor:
        tokens = torch.randint(3, VOCABULARY, (rows, length), generator=random)
        lengths = torch.randint(1, length + 1, (rows, 1), generator=random)
        return torch.where(torch.arange(length) < lengths, tokens, PAD)

    targets = [padded(rows, target) for rows, _, target in shapes]
    sources = [padded(rows, source) for rows, source, _ in shapes]
    return [(s, torch.cat([torch.ones_like(t[:, :1]), t[:, :-1]], 1), t) for s, t in zip(sources, targets, strict=True)]


def one_after_another(batches: list[Batch]) -> tuple[Tensor, ...]:
    return tuple(torch.cat([side.flatten() for side in sides]) for sides in zip(*batches, strict=True))


def shapes_of(batches: list[Batch]) -> list[JoinedShape]:
    real = [[int((side != PAD).sum()) for side in (source, target)] for source, _, target in batches]
    return [JoinedShape(*b[0].shape, b[2].shape[1], *numbers) for b, numbers in zip(batches, real, strict=True)]


def gradients(model: Transformer, *losses: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.stack(losses).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"positions": "learned", "max_positions": 16}, *VARIANTS])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_joined_batches_have_the_sum_of_their_losses_and_its_gradients(
    make_model: MakeModel, settings: dict[str, Any], checkpointing: bool
) -> None:
    model, batches = make_model(**settings).double().train(), batches_of(SHAPES)
    alone = [model.loss(*batch, 0.1) for batch in batches]
    expected = gradients(model, *(loss for loss, _ in alone))
    model.activation_checkpointing = checkpointing
    loss, nll = model.loss(*one_after_another(batches), 0.1, None, shapes_of(batches))
    torch.testing.assert_close(loss, torch.stack([loss for loss, _ in alone]).sum())
    torch.testing.assert_close(nll, torch.stack([nll for _, nll in alone]).sum())
    torch.testing.assert_close(gradients(model, loss), expected)


def test_a_batch_without_tokens_adds_nothing_to_what_it_is_joined_with(make_model: MakeModel) -> None:
    model, (real,) = make_model().double().eval(), batches_of(SHAPES[:1])
    weightless = torch.full((1, 1), 2), torch.full((1, 1), 2), torch.full((1, 1), PAD)
    shapes = [*shapes_of([real]), JoinedShape(1, 1, 1, 1, 1)]  # as `inputs_of` counts
    loss, nll = model.loss(*one_after_another([real, weightless]), 0.1, None, shapes)
    torch.testing.assert_close((loss, nll), model.loss(*real, 0.1))


def test_parts_are_used_in_the_same_order_with_and_without_padding(make_model: MakeModel) -> None:
    """Their weights arrive in this order (WeightGather, ZeRO 3), while some ranks may compute one way and some the other."""
    model, batches, used = make_model(shared_embeddings=False), batches_of(SHAPES), []
    for number, part in enumerate(model.in_order_of_use()):
        part.register_forward_pre_hook(lambda *_, number=number: used.append(number))
    model.loss(*batches[0], 0.1)
    padded = used.copy()
    used.clear()
    model.loss(*one_after_another(batches), 0.1, None, shapes_of(batches))
    assert used == padded


def test_a_sentence_of_joined_batches_skips_a_layer_as_a_whole(make_model: MakeModel) -> None:
    model, seen = make_model(layer_drop=0.5), []
    hooks = [model.encoder_layers[0].register_forward_hook(lambda _, given, output: seen.extend((given[0], output)))]
    hooks += [model.encoder_layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))]
    batches = batches_of([(200, 4, 2), (150, 6, 2)])
    model.loss(*one_after_another(batches), 0.0, None, shapes_of(batches))
    lengths = torch.cat([(source != PAD).sum(1) for source, *_ in batches]).tolist()
    are_skipped = []
    for entered, given, left in zip(*(torch.split(tensor[0], lengths) for tensor in seen), strict=True):
        is_skipped, is_kept = (torch.equal(left, other) for other in (entered, given))
        assert is_skipped ^ is_kept
        are_skipped.append(is_skipped)
    assert 0.3 < sum(are_skipped) / len(are_skipped) < 0.7


def test_joining_is_the_inverse_of_splitting() -> None:
    batches = batches_of(SHAPES)
    is_real = torch.cat([(source != PAD).flatten() for source, *_ in batches])
    sizes, real = [(rows, length) for rows, length, _ in SHAPES], is_real.nonzero()[:, 0]
    side = Joined(sizes, real, torch.empty(0), torch.tensor([0]), [])
    joined = torch.randn(1, len(real), 3)
    parts = side.split(joined)
    assert [part.shape[:2] for part in parts] == sizes
    assert not torch.cat([part.flatten(0, 1) for part in parts])[~is_real].any()
    assert torch.equal(side.join(parts), joined)


def test_joined_batches_never_make_the_host_wait_for_the_device(make_model: MakeModel) -> None:
    names = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(str(func).removeprefix("aten.").split(".")[0])
            return func(*args, **(kwargs or {}))

    model, batches = make_model(dropout=0.0).train(), batches_of(SHAPES)  # that of CPUs draws its seed
    shapes = shapes_of(batches)
    with Names():
        loss, _ = model.loss(*one_after_another(batches), 0.1, sum(shape.target_tokens for shape in shapes), shapes)
        loss.backward()
    assert "nonzero_static" in names
    assert not names & {"_local_scalar_dense", "nonzero", "item", "masked_select", "equal", "is_nonzero"}
