"""Small chunks and ranges, and what an undisturbed preparation makes in them."""

import pytest
from prepare_helpers import SMALL, config_of, write_text

from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare import chunks
from dist_transformer.data.prepare.preparation import prepare


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in SMALL.items():
        monkeypatch.setattr(chunks, name, rows)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """What an undisturbed preparation makes."""
    folder = tmp_path_factory.mktemp("whole")
    write_text(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, rows in SMALL.items():
            patch.setattr(chunks, name, rows)
        return prepare(config_of(folder))
