"""COMET without its package: one message, in commands and before the first step."""

import sys

import pytest

from dist_transformer.decoding.comet import CometScorer
from dist_transformer.errors import UserError


def test_a_missing_package_is_named_with_how_to_install_it_and_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet", None)
    with pytest.raises(UserError, match=r"unbabel-comet.*pip install unbabel-comet, or go on without") as caught:
        CometScorer("Unbabel/wmt22-comet-da")
    assert "\n" not in str(caught.value)
