"""What the mends that keep torch's compiler and mlflow out of a rank leave as it was."""

import sys

import pytest
import torch

from dist_transformer.training.engine.deepspeed_patches import (
    call_as_not_compiled,
    not_compiling,
    step_as_not_compiled,
    without_mlflow,
)


class Compiler:
    """DeepSpeed's module of that name."""

    @staticmethod
    def compile():
        return lambda function: None

    @staticmethod
    def dummy_decorator(function):
        return function


@pytest.fixture
def no_mlflow(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)


def stepped(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> torch.Tensor:
    for number in range(3):
        weight.grad = torch.linspace(-1, 1, 7) * (number + 1)
        optimizer.step()
    return weight.detach()


def test_adams_step_without_marks_for_the_compiler_gives_the_same_bits():
    first, second = (torch.linspace(1, 2, 7).requires_grad_() for _ in range(2))
    settings = {"lr": 0.1, "weight_decay": 0.01, "betas": (0.9, 0.98), "eps": 1e-9}
    plain, mended = torch.optim.AdamW([first], **settings), torch.optim.AdamW([second], **settings)
    step_as_not_compiled(mended)
    assert torch.equal(stepped(plain, first), stepped(mended, second))
    assert torch.is_grad_enabled()


def test_what_is_hidden_from_the_compiler_is_called_without_importing_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import of it fails
    hidden = torch._disable_dynamo(lambda number: 2 * number)
    with pytest.raises(ImportError):
        hidden(3)
    call_as_not_compiled([hidden, len])  # what is not decorated is left alone
    assert hidden(3) == 6


def test_an_import_of_mlflow_fails_while_deepspeed_is_imported_and_works_afterwards(no_mlflow):
    with without_mlflow(), pytest.raises(ImportError):
        import mlflow  # noqa: F401
    assert "mlflow" not in sys.modules


def test_an_mlflow_that_is_there_already_stays_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", sys)
    with without_mlflow():
        assert sys.modules["mlflow"] is sys
    assert sys.modules["mlflow"] is sys


def test_decorators_for_the_compiler_do_nothing_within_and_are_put_back_afterwards():
    before = Compiler.compile, torch.compiler.disable
    with not_compiling(Compiler):
        assert Compiler.compile()(len) is len
        assert torch.compiler.disable(len) is len
        assert torch.compiler.disable(fn=len, recursive=False, reason="hooks") is len
        assert torch.compiler.disable(recursive=False)(len) is len
        assert torch.compiler.disable()(len) is len
    assert (Compiler.compile, torch.compiler.disable) == before
