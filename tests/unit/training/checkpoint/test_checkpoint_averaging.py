"""The average is the mean."""

import torch
from torch import Tensor

from dist_transformer.training.checkpoint.final_model import average_weights


def random_weights(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)} for _ in range(count)
    ]


def test_the_average_is_the_mean_of_each_tensor() -> None:
    sources = random_weights(7)
    average = average_weights(sources)
    assert average.keys() == {"a", "b"}
    for name, tensor in average.items():
        expected = torch.stack([source[name].double() for source in sources]).mean(0).float()
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-7)
        assert tensor.dtype == torch.float32


def test_the_average_of_one_is_itself_and_of_equals_is_the_same() -> None:
    (source,) = random_weights(1)
    for sources in ([source], [source] * 5):
        average = average_weights(sources)
        assert all(torch.equal(average[name], source[name]) for name in source)


def test_small_differences_survive_large_weights() -> None:
    average = average_weights([{"a": torch.tensor([1e7 + number])} for number in (0, 1, 2)])
    assert average["a"].item() == 1e7 + 1


def test_the_sources_are_left_as_they_were() -> None:
    sources = random_weights(2)
    before = [{name: tensor.clone() for name, tensor in source.items()} for source in sources]
    average_weights(sources)
    assert all(torch.equal(s[name], b[name]) for s, b in zip(sources, before, strict=True) for name in s)
