"""COMET without its package: one message, in commands and before the first step."""

import sys
from types import ModuleType

import pytest

from dist_transformer.decoding.comet import CometScorer
from dist_transformer.errors import UserError


@pytest.mark.parametrize("name", ["somebody/comet", "wmt22", "../Unbabel/x", "missing.ckpt", ""])
def test_a_model_of_others_is_not_fetched_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked: list[str] = []
    package = ModuleType("comet")
    monkeypatch.setattr(package, "download_model", asked.append, raising=False)
    monkeypatch.setattr(package, "load_from_checkpoint", asked.append, raising=False)
    monkeypatch.setitem(sys.modules, "comet", package)
    with pytest.raises(
        UserError, match=r"Unbabel/wmt22-comet-da, or a checkpoint file .*download yourself and give its file"
    ):
        CometScorer(name)
    assert asked == []


def test_a_missing_package_is_named_with_how_to_install_it_and_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet", None)
    with pytest.raises(UserError, match=r"unbabel-comet.*pip install unbabel-comet, or continue without") as caught:
        CometScorer("Unbabel/wmt22-comet-da")
    assert "\n" not in str(caught.value)
