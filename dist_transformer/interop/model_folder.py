"""A model folder, for translating, sharing and registering a model. No pickles, nothing executed on loading.

docs/interop.md lists its files. Besides: plugin.py, a copy of the file that `model.plugin` names, to be read: it is executed
only if the user names it; and README.md, the model card, which older folders lack.
"""

import errno
import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dist_transformer.config.checks import check_model
from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.manifest import Manifest
from dist_transformer.errors import CheckpointError
from dist_transformer.files import MISPLACED, file_sha256, is_file, patiently, share_as_folder, write_json, write_text
from dist_transformer.interop.complete_folder import complete_folder
from dist_transformer.interop.model_card import CARD, MARK, Origin, model_card, read_card
from dist_transformer.model.plugin import build_plugin
from dist_transformer.model.transformer import Transformer
from dist_transformer.plugins import find
from dist_transformer.run.records import read_record, read_record_patiently

LABEL = "dist-transformer"
FORMAT = 1
WEIGHTS, CONFIG, SOURCE_MODEL, TARGET_MODEL = "model.safetensors", "config.json", "source.model", "target.model"
PLUGIN = "plugin.py"
FILES = (WEIGHTS, CONFIG, SOURCE_MODEL, TARGET_MODEL, PLUGIN)
MODEL_FOLDER = "a model folder"


@dataclass(frozen=True)
class TokenizerFiles:
    """Paths of the sentencepiece models; `target` None: one model for both sides."""

    source: Path
    target: Path | None = None

    def read(self) -> tuple[bytes, bytes]:
        """Returns the contents of both sides, which are equal where the tokens are."""
        return self.source.read_bytes(), (self.target or self.source).read_bytes()


@dataclass(frozen=True)
class ModelInformation:
    """Information about a model besides its weights."""

    source_vocabulary: int
    target_vocabulary: int
    pad_id: int
    bos_id: int
    eos_id: int
    source_language: str
    target_language: str
    step: int
    """Optimizer steps of the (newest) weights."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on the CPU, with its tokenizer files, configuration and information. `card`: text of its
    model card; empty where there is none, as in older folders."""

    model: Transformer
    tokenizer_files: TokenizerFiles
    config: ModelConfig
    information: ModelInformation
    card: str = ""


def save_model_folder(
    folder: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer_files: TokenizerFiles,
    information: ModelInformation,
    origin: Origin = Origin(),  # noqa: B008  (frozen)
    plugin_file: Path | None = None,
) -> None:
    """Writes the folder atomically, in place of an older model folder; one process calls it.

    `plugin_file`: that of `config.plugin`, which is copied and not executed.

    `weights` are those of `model.named_parameters()`, in any float type. Raises CheckpointError if they are not the
    weights of `config`.
    """
    header: dict[str, Any] = {"label": LABEL, "format": FORMAT}
    if config.plugin is None:
        _check_weights(weights, empty_model(config, information), f"the weights for {folder}")
    elif plugin_file is None or not plugin_file.is_file():
        raise CheckpointError(f"{plugin_file}: no such file, expected the copy of model.plugin; put it back there")
    else:
        header["plugin_sha256"] = file_sha256(plugin_file)
    contiguous = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in weights.items()}
    with complete_folder(folder, MODEL_FOLDER, is_model_folder, FILES) as temporary:
        write_safetensors(contiguous, temporary / WEIGHTS, {"format": "pt"})
        shutil.copyfile(tokenizer_files.source, temporary / SOURCE_MODEL)
        if tokenizer_files.target is not None:
            shutil.copyfile(tokenizer_files.target, temporary / TARGET_MODEL)
        if plugin_file is not None:
            shutil.copyfile(plugin_file, temporary / PLUGIN)
        write_json(temporary / CONFIG, {**header, **asdict(information), "model": config.model_dump(mode="json")})
        parameters = sum(tensor.numel() for tensor in contiguous.values())
        if MARK in read_card(folder / CARD) or not (folder / CARD).exists():  # without its mark it is the user's
            write_text(temporary / CARD, model_card(config, asdict(information), parameters, origin, folder / CARD))


def load_model_folder(folder: Path, plugin: str | None = None) -> LoadedModel:
    """Loads a folder written by `save_model_folder`. CheckpointError names missing, damaged or unfitting parts.

    `plugin`: the network's code as the user names it, without which a model of a plug-in is refused: code that comes with
    a folder is not executed.
    """
    config, information = read_config(folder)
    files = tokenizer_files(folder)
    if config.plugin is not None:
        config = config.model_copy(update={"plugin": _named_plugin(folder, config.plugin, plugin)})
    model = empty_model(config, information)
    weights_path = _existing(folder / WEIGHTS)
    with open_safetensors(weights_path) as file:  # copied: the file may be replaced or cut while the model is used
        weights = {name: file.get_tensor(name).to(torch.float32, copy=True) for name in file.keys()}  # noqa: SIM118
    _check_weights(weights, model, str(weights_path))
    # Not strict, since a tied parameter has two names in the module and one in the file; all names were just checked.
    model.load_state_dict(weights, strict=False, assign=config.plugin is None)
    return LoadedModel(model.eval(), files, config, information, read_card(folder / CARD))


def card_of(loaded: LoadedModel) -> str:
    """The model card of a loaded model; where its folder has none, one without its data and scores."""
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    return loaded.card or model_card(loaded.config, asdict(loaded.information), parameters, Origin())


def is_model_folder(folder: Path) -> bool:
    """True if this program, in any version, wrote the folder, by the label in it."""
    return read_record_patiently(folder / CONFIG).get("label") == LABEL


def tokenizer_files(folder: Path) -> TokenizerFiles:
    """The sentencepiece models of a model folder or of a folder for CTranslate2. CheckpointError: there are none."""
    source, target = _existing(folder / SOURCE_MODEL), folder / TARGET_MODEL
    return TokenizerFiles(source, target if is_file(target, MISPLACED) else None)


def read_config(folder: Path) -> tuple[ModelConfig, ModelInformation]:
    """Reads config.json of a model folder. Raises CheckpointError if it is missing, invalid or another program's."""
    path = _existing(folder / CONFIG)
    try:
        content = json.loads(patiently(path, lambda: path.read_text(encoding="utf-8"), MISPLACED))
        if content.get("model_type") == "marian":
            raise CheckpointError(
                f"{path.parent}: a MarianMTModel of Hugging Face, expected a model folder: make one with "
                f"dist-transformer import {shlex.quote(str(path.parent))} OUT --from marian"
            )
        label, version = content.pop("label"), content.pop("format")
        content.pop("plugin_sha256", None)
        if (label, version) != (LABEL, FORMAT):
            raise CheckpointError(
                f"{path}: expected label {LABEL} and format {FORMAT}, found {label} and {version}. "
                "Use the version of the program that wrote it."
            )
        config = ModelConfig(**content.pop("model"))
        information = ModelInformation(**content)
        for name, value in asdict(information).items():
            expected = str if name.endswith("_language") else int
            if not isinstance(value, expected):
                raise TypeError(f"{name} is {value!r}, expected {expected.__name__}")
        _check_sizes(config, information)
        return config, information
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not the configuration of a model folder ({error}). Save it again.") from error


def empty_model(config: ModelConfig, about: ModelInformation | Manifest) -> Transformer:
    """The model with shapes but no values, on "meta": needs no memory, time or random numbers. A plug-in's is on the CPU."""
    sizes = about.source_vocabulary, about.target_vocabulary, about.pad_id
    if config.plugin is not None:
        with torch.random.fork_rng(devices=[]):  # its code may compute with values; leaving "meta" parts tied weights
            return build_plugin(find("model.plugin", config.plugin), config, *sizes)
    with torch.device("meta"), _NothingDrawn():
        return Transformer(config, *sizes)


def write_safetensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a file of tensors, open to all who may read its folder. Raises OSError: the disk is full, or fails."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    share_as_folder(path)


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a file whose tensors are read on access. Raises CheckpointError: it is missing, cut short or invalid;
    PermissionError."""
    try:
        file = patiently(path, lambda: safetensors_file(path), MISPLACED)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file, expected safetensors weights.") from error
    except PermissionError:
        raise  # its message names the owner, whom to ask
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: damaged or cut short, expected a complete safetensors file ({error}). Copy or save it again."
        ) from error
    with file:
        yield file


def safetensors_file(path: Path) -> Any:
    """Opens a file whose tensors are read on access. Raises OSError, SafetensorError: it is damaged."""
    path.open("rb").close()  # safetensors reports every file that it cannot open as missing
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:  # of torch, which opens it once more
        raise OSError(errno.EIO, str(error), str(path)) from error


def _named_plugin(folder: Path, recorded: str, given: str | None) -> str:
    """Returns the plug-in that the user names, if its file is the one that the model was trained with."""
    if given is None:
        raise CheckpointError(
            f"{folder}: its network is the plug-in {Path(recorded).name}, code that is executed only if you name it: give "
            f"translate or evaluate --plugin FILE:NAME with a file that you trust (a copy to read: {folder / PLUGIN}); other "
            "commands take models of this program only"
        )
    file, expected = find("--plugin", given).file, read_record(folder / CONFIG).get("plugin_sha256")
    if (found := file_sha256(file)) != expected:
        raise CheckpointError(
            f"--plugin: {file} is not the file that the model in {folder} was trained with: expected SHA-256 {expected}, "
            f"found {found}; name the same file"
        )
    return given


def _existing(path: Path) -> Path:
    if not is_file(path, MISPLACED):
        raise CheckpointError(
            f"{path.parent} is not a complete model folder: {path.name} is missing. Expected {CONFIG}, {WEIGHTS} and "
            f"{SOURCE_MODEL}, as in the `model` folder of a finished run."
        )
    return path


def _check_sizes(config: ModelConfig, information: ModelInformation) -> None:
    rows = min(information.source_vocabulary, information.target_vocabulary)
    for name in ("pad_id", "bos_id", "eos_id"):
        if not 0 <= (value := getattr(information, name)) < rows:
            raise ValueError(f"{name} is {value}, expected an id of both vocabularies, below {rows}")
    if max(information.source_vocabulary, information.target_vocabulary) >= 2**31:
        raise ValueError("a vocabulary of over 2,147,483,647 pieces")
    for problem in check_model(config):
        raise ValueError(problem)
    if config.shared_embeddings and information.source_vocabulary != information.target_vocabulary:
        raise ValueError("shared_embeddings needs one vocabulary, but source_vocabulary is not target_vocabulary")


class _NothingDrawn(TorchFunctionMode):
    """Skips drawing initial values, which "meta" tensors do not hold: for that torch would import its compiler."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", None) in ("normal_", "uniform_"):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def _check_weights(weights: Mapping[str, Tensor], model: Transformer, where: str) -> None:
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not in the model" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} is {found[name]}, expected {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{where} do not fit the model's configuration: {'; '.join(problems[:5])}{more}. "
            "Check that weights and configuration come from one run."
        )
