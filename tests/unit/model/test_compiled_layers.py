"""Compiled layers compute what the others do, and are compiled once, not for each shape.

The compiler's own kernels are tried in tests/system/test_passes.py; here its graphs run without them, which is quicker.
"""

import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_joined_batches import VOCABULARY, Batch, batches_of, end_to_end

from dist_transformer.config.schema import ModelConfig
from dist_transformer.errors import UserError
from dist_transformer.model.transformer import Shapes, Transformer
from dist_transformer.training.engine.objective import Objective

SHAPES = [(3, 5, 7), (4, 2, 8), (5, 17, 30), (8, 8, 8), (16, 3, 3), (7, 40, 41), (2, 16, 16), (9, 33, 2), (30, 24, 8)]


@pytest.fixture
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Transformer, Transformer]:
    """The same model as it is and compiled, in bf16 layers or fp32, also with rotary positions."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    positions = "rotary" if request.param == "rotary" else "sinusoidal"
    config = ModelConfig(preset="tiny", dropout=0.0, positions=positions, **sizes)
    plain, compiled = (Transformer(config, VOCABULARY, VOCABULARY, 0) for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    if request.param == "bf16":
        plain.round_layers(torch.bfloat16)
        compiled.round_layers(torch.bfloat16)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled.compile_layers()
    return plain, compiled


def loss_and_gradient(model: Transformer, sides: Batch, shapes: Shapes | None) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss, _ = model.loss(*sides, 0.1, None, shapes)
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("models", ["fp32", "bf16", "rotary"], indirect=True)
def test_losses_and_gradients_are_those_without_a_compiler_for_all_shapes_with_few_graphs(
    models: tuple[Transformer, Transformer],
) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    graphs = []
    is_short = models[0].encoder_layers[0].feed_forward.inner.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    for shape in SHAPES:
        (batch,) = batches_of([shape])
        expected, found = (loss_and_gradient(model, batch, None) for model in models)
        tolerance = 2e-2 if is_short else 1e-4
        assert found[0] == pytest.approx(expected[0], rel=tolerance)
        assert float((found[1] - expected[1]).norm() / expected[1].norm()) < tolerance
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[0], "a shape was compiled anew"
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("models", ["fp32"], indirect=True)
def test_joined_batches_are_compiled_once_for_all_shapes(models: tuple[Transformer, Transformer]) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    graphs = []
    for number in range(0, len(SHAPES) - 1, 2):
        shapes = SHAPES[number : number + 2]
        sides = end_to_end(batches_of(shapes))
        expected, found = (loss_and_gradient(model, sides, shapes) for model in models)  # type: ignore[arg-type]
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 1e-4
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[0], "a shape was compiled anew"


def test_python_without_its_headers_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # a compiler is there
    monkeypatch.setattr(sysconfig, "get_path", lambda *names: str(tmp_path))
    sizes: dict[str, Any] = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    objective = Objective(Transformer(ModelConfig(**sizes), VOCABULARY, VOCABULARY, 0), 0.1, "fp32")
    with pytest.raises(UserError, match=rf"training\.compile_layers: .*{tmp_path}/Python\.h is missing: .*python3-dev"):
        objective.compile_layers()
    (tmp_path / "Python.h").touch()
    objective.compile_layers()
