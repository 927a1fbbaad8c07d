"""Model folders and foreign weights with anything in their files: used as they are, or refused with a message."""

import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenised_models import make_model_folder

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.decoding.loaded_model import LoadedTranslator
from dist_transformer.errors import UserError
from dist_transformer.interop.ctranslate2_export import export_ctranslate2
from dist_transformer.interop.foreign_weights import read_tensors
from dist_transformer.interop.marian import export_marian
from dist_transformer.interop.model_folder import load_model_folder

ODD_VALUES: list[Any] = [
    None,
    "x",
    "",
    -1,
    0,
    1,
    2,
    3,
    10**6,
    2**31,
    2**70,
    1.5,
    float("nan"),
    [],
    {},
    True,
    False,
    [1],
    {"a": 1},
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "whole"
    make_model_folder(folder)
    return folder


def translated(folder: Path, _: Path) -> None:
    list(LoadedTranslator(folder, DecodingConfig(max_extra_tokens=3)).translate(["A man reads.", ""]))


def exported_to_ctranslate2(folder: Path, out: Path) -> None:
    export_ctranslate2(load_model_folder(folder), out)


def exported_to_marian(folder: Path, out: Path) -> None:
    export_marian(load_model_folder(folder), out)


USES = [translated, exported_to_ctranslate2, exported_to_marian]


def must_end_in_a_message(use: Callable[[Path, Path], None], folder: Path, what: object) -> None:
    try:
        use(folder, folder.parent / "out")
    except UserError:
        pass
    except Exception as error:
        raise AssertionError(f"after {what}") from error
    shutil.rmtree(folder.parent / "out", ignore_errors=True)


def damaged(content: bytes, chooser: random.Random) -> bytes:
    """Torn, overwritten, with bytes put in or taken out, or empty; within its first bytes, where lengths and names stand:
    numbers behind them may be any."""
    at = min(chooser.choice([0, 1, 8, 9, 100, chooser.randrange(2000)]), len(content) - 1)
    noise = chooser.randbytes(chooser.choice([1, 1, 8, 100]))
    kind = chooser.randrange(5)
    if kind == 0:
        return content[:at]
    return content[:at] + (b"" if kind == 1 else noise) + content[at + (0 if kind == 2 else len(noise)) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "source.model"])
@pytest.mark.parametrize("use", USES)
def test_any_damage_to_the_bytes_of_a_file_is_told_in_a_message(whole, tmp_path, name, use):
    chooser, content = random.Random(f"{name} {use.__name__}"), (whole / name).read_bytes()
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    for number in range(25):
        (folder / name).write_bytes(damaged(content, chooser))
        must_end_in_a_message(use, folder, number)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "source.model"])
@pytest.mark.parametrize("use", USES)
def test_a_file_that_is_missing_or_a_folder_or_a_link_to_itself_is_told_in_a_message(whole, tmp_path, name, use):
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    (folder / name).unlink()
    must_end_in_a_message(use, folder, "missing")
    (folder / name).symlink_to(name)
    must_end_in_a_message(use, folder, "a link to itself")
    (folder / name).unlink()
    (folder / name).mkdir()
    must_end_in_a_message(use, folder, "a folder")


def changed(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The content with one value changed, taken out, or added."""
    for key, value in content.items():
        yield f"without {key}", {other: kept for other, kept in content.items() if other != key}
        for odd in ODD_VALUES:
            yield f"{key}: {odd}", {**content, key: odd}
        if isinstance(value, dict):
            for what, inner in changed(value):
                yield f"{key}.{what}", {**content, key: inner}
    yield "unknown key", {**content, "unknown": 1}


@pytest.mark.slow
def test_any_other_value_in_the_configuration_of_a_model_is_told_in_a_message(whole, tmp_path):
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for what, other in changed(content):
        (folder / "config.json").write_text(json.dumps(other), encoding="utf-8")
        must_end_in_a_message(translated, folder, what)


@pytest.mark.parametrize("is_zip", [True, False])
def test_any_damage_to_weights_that_torch_saved_is_told_in_a_message(tmp_path, is_zip):
    chooser, buffer = random.Random(5), io.BytesIO()
    tensors = {f"layer.{number}.weight": torch.rand(3, 4) for number in range(4)}
    torch.save(tensors, buffer, _use_new_zipfile_serialization=is_zip)
    for number in range(400):
        (tmp_path / "weights.pt").write_bytes(damaged(buffer.getvalue(), chooser))
        must_end_in_a_message(lambda path, _: read_tensors(path / "weights.pt"), tmp_path, number)
