"""What is saved is what is loaded; what is damaged is named."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stuttering_disk import FOR_GOOD, stuttering
from tokenised_models import make_model_folder

from dist_transformer.errors import CheckpointError, MachineError
from dist_transformer.files import write_text
from dist_transformer.interop.complete_folder import complete_folder
from dist_transformer.interop.marian import export_marian
from dist_transformer.interop.model_folder import TokenizerFiles, load_model_folder, save_model_folder, tokenizer_files
from dist_transformer.model.plugin import build_plugin
from dist_transformer.plugins import find

Save = Callable[..., Any]
SOURCE, TARGET_IN = torch.tensor([[5, 6, 7, 2], [8, 2, 0, 0]]), torch.tensor([[1, 4, 5], [1, 6, 0]])


@pytest.mark.parametrize(
    ("shared", "given"),
    [
        (True, {}),
        (False, {}),
        (True, {"num_heads": 3, "key_size": 5, "value_size": 7}),
        (True, {"positions": "learned", "max_positions": 6}),
        (True, {"norm": "deepnorm", "positions": "rotary", "activation": "swiglu", "norm_type": "rms"}),
        (False, {"final_norm": True, "output_bias": True, "tied_output": False, "layer_drop": 0.5}),
    ],
)
def test_a_loaded_model_is_the_saved_one(shared: bool, given: dict[str, Any], save_small_model: Save) -> None:
    saved = save_small_model(shared, **given)
    loaded = load_model_folder(saved.folder)
    assert not loaded.model.training
    assert torch.equal(loaded.model(SOURCE, TARGET_IN), saved.model.eval()(SOURCE, TARGET_IN))
    assert (loaded.config, loaded.information) == (saved.config, saved.information)
    assert loaded.tokenizer_files.source.read_bytes() == b"pieces of the source"
    assert (loaded.tokenizer_files.target is None) == shared
    if loaded.tokenizer_files.target is not None:
        assert loaded.tokenizer_files.target.read_bytes() == b"pieces of the target"


def test_a_folder_from_before_the_model_had_variants_is_the_same_model(save_small_model: Save) -> None:
    saved = save_small_model()
    path = saved.folder / "config.json"
    content = json.loads(path.read_text())
    for name in ("norm_type", "final_norm", "activation", "layer_drop", "output_bias", "attention_gain", "key_size"):
        del content["model"][name]
    path.write_text(json.dumps(content))
    loaded = load_model_folder(saved.folder)
    assert loaded.config == saved.config
    assert torch.equal(loaded.model(SOURCE, TARGET_IN), saved.model.eval()(SOURCE, TARGET_IN))


def test_a_loaded_model_stays_what_it_was_when_another_is_copied_over_its_file(save_small_model: Save) -> None:
    saved = save_small_model()
    model = load_model_folder(saved.folder).model
    before, weights = model(SOURCE, TARGET_IN), saved.folder / "model.safetensors"
    with weights.open("r+b") as file:  # as `cp` does: the file keeps its inode
        file.write(b"?" * weights.stat().st_size)
    assert torch.equal(model(SOURCE, TARGET_IN), before)


def test_a_loaded_model_can_be_trained_further(save_small_model: Save) -> None:
    model = load_model_folder(save_small_model().folder).model
    model.loss(SOURCE, TARGET_IN, TARGET_IN, 0.1)[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


NETWORK = """import torch
class build(torch.nn.Module):
    def __init__(self, config, source_vocabulary, target_vocabulary, pad_id):
        super().__init__()
        self.embedding, self.out = torch.nn.Embedding(target_vocabulary, 8), torch.nn.Linear(8, target_vocabulary)
        {given}
    def forward(self, source, target):
        return self.out(self.embedding(source).mean(1, True) + self.embedding(target) {used})
"""


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("self.out.weight = self.embedding.weight", ""),
        ("self.rates = [each.item() for each in torch.linspace(0, 1, 8)]", "* self.rates[3]"),
        ("self.table = torch.linspace(0, 1, 8)", "+ self.table"),
    ],
)
def test_a_loaded_network_of_a_plug_in_has_its_ties_and_the_values_that_it_computes_when_built(
    tmp_path: Path, given: str, used: str, save_small_model: Save
) -> None:
    saved, file = save_small_model(), tmp_path / "network.py"
    file.write_text(NETWORK.format(given=given, used=used))
    plugin = f"{file}:build"
    config = saved.config.model_copy(update={"plugin": plugin})
    model = build_plugin(find("model.plugin", plugin), config, 16, 16, 0)
    weights = dict(model.named_parameters())
    save_model_folder(saved.folder, weights, config, saved.tokenizer_files, saved.information, plugin_file=file)
    before = torch.get_rng_state()
    loaded = load_model_folder(saved.folder, plugin)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(loaded.model(SOURCE, TARGET_IN), model(SOURCE, TARGET_IN))
    assert dict(loaded.model.named_parameters()).keys() == weights.keys()


def test_loading_draws_no_random_numbers(save_small_model: Save) -> None:
    saved = save_small_model()
    before = torch.get_rng_state()
    load_model_folder(saved.folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_matrices_are_stored_once_and_in_fp32(save_small_model: Save) -> None:
    saved = save_small_model()
    saved.model.half()
    saved.save()
    with safe_open(saved.folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert names == {name for name, _ in saved.model.named_parameters()}
        assert {file.get_tensor(name).dtype for name in names} == {torch.float32}
    assert "source_embedding.weight" in names
    assert "target_embedding.weight" not in names


def test_saving_again_replaces_the_folder_and_leaves_nothing_else(save_small_model: Save) -> None:
    saved = save_small_model()
    with torch.no_grad():
        saved.model.source_embedding.weight.fill_(3.0)
    saved.information = replace(saved.information, step=2400)
    saved.save()
    loaded = load_model_folder(saved.folder)
    assert loaded.information.step == 2400
    assert loaded.model.source_embedding.weight.eq(3.0).all()
    assert [path.name for path in saved.folder.parent.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_the_older_folder_as_it_was(save_small_model: Save, tmp_path: Path) -> None:
    saved = save_small_model()
    before = (saved.folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        saved.model.source_embedding.weight.fill_(3.0)
    saved.tokenizer_files = TokenizerFiles(tmp_path / "no such file")
    with pytest.raises(FileNotFoundError):
        saved.save()
    assert (saved.folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in saved.folder.parent.iterdir()] == ["model"]


def test_weights_that_the_disk_does_not_take_are_told_and_leave_nothing(
    save_small_model: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    loaded = make_model_folder(tmp_path / "small")
    monkeypatch.setattr(safetensors.torch, "serialize_file", full)
    for save in (save_small_model, lambda: export_marian(loaded, tmp_path / "run" / "theirs")):
        with pytest.raises(MachineError, match=r"cannot be written \(I/O error: No space left .* make room"):
            save()
        assert not [*(tmp_path / "run").iterdir()]


@pytest.mark.parametrize("is_there", [True, False])
def test_an_older_folder_is_there_again_if_the_new_one_cannot_have_its_name(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "model", os.rename
    if is_there:
        write_text(folder / "config.json", "old")

    def fail(source: Path, target: Path) -> None:
        if Path(source).suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with (
        pytest.raises(MachineError, match=r"model: cannot be written .*Input/output error"),
        complete_folder(folder, "a model folder", Path.is_dir) as new,
    ):
        (new / "config.json").write_text("new")
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")} == (
        {"model/config.json"} if is_there else set()
    )
    if is_there:
        assert (folder / "config.json").read_text() == "old"


def test_an_older_folder_that_cannot_be_brought_back_now_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "model", os.rename
    write_text(folder / "config.json", "old")

    def fail(source: Path, target: Path) -> None:
        if Path(source) != folder:
            raise OSError(errno.EIO if Path(source).suffix == ".tmp" else errno.EACCES, "fails", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with (
        pytest.raises(MachineError, match=r"model: cannot be written .*\.tmp"),
        complete_folder(folder, "a model folder", Path.is_dir),
    ):
        pass
    monkeypatch.setattr(os, "rename", rename)
    with complete_folder(folder, "a model folder", Path.is_dir) as new:
        assert (folder / "config.json").read_text() == "old"
        (new / "more.json").write_text("new")


def _refused(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("refuses_links", [False, True])
def test_a_model_is_saved_and_replaced_on_a_disk_that_keeps_no_permissions(
    refuses_links: bool, save_small_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "chmod", _refused)
    if refuses_links:
        monkeypatch.setattr(os, "link", _refused)
    saved = save_small_model()
    write_text(saved.folder / "notes" / "today.txt", "mine")
    saved.information = replace(saved.information, step=2400)
    saved.save()
    assert load_model_folder(saved.folder).information.step == 2400
    assert (saved.folder / "notes" / "today.txt").read_text() == "mine"


def test_a_private_file_of_an_older_folder_stays_private_on_a_disk_without_hard_links(
    save_small_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", _refused)
    saved = save_small_model()
    private = saved.folder / "notes.txt"
    write_text(private, "mine", mode=0o600)
    before = private.stat()
    saved.save()
    assert (private.stat().st_mode, private.stat().st_mtime) == (before.st_mode, before.st_mtime)


def test_an_older_folder_whose_files_cannot_be_copied_stays_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "model" / "notes" / "today.txt", "mine")
    monkeypatch.setattr(os, "link", _refused)
    monkeypatch.setattr(shutil, "copyfile", _refused)
    with (
        pytest.raises(MachineError, match=r"model: cannot be written \(\[Errno 1\] Operation not permitted\)"),
        complete_folder(tmp_path / "model", "a model folder", Path.is_dir) as new,
    ):
        (new / "config.json").write_text("new")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")] == ["model/notes/today.txt"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_that_has_its_name_is_written_though_that_cannot_be_flushed(
    is_there: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fsync = tmp_path / "model", os.fsync

    def fails(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    if is_there:
        write_text(folder / "config.json", "old")
    monkeypatch.setattr(os, "fsync", fails)
    with complete_folder(folder, "a model folder", Path.is_dir) as new:
        (new / "config.json").write_text("new")
    assert (folder / "config.json").read_text() == "new"
    assert f"{folder}: is written, but its name is not flushed to the disk: [Errno 5]" in caplog.text
    left = [path.read_text() for path in tmp_path.glob(".model.*.old/config.json")]
    assert left == (["old"] if is_there else [])


KILLED = """
import os, signal, sys
from pathlib import Path
from dist_transformer.interop.complete_folder import complete_folder

def killing(audited: str, arguments: tuple) -> None:
    if audited in ("os.rename", "shutil.rmtree") and ".model." in str(arguments[0]) + str(arguments[1]):
        left.append(audited)
        if len(left) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

left = []
sys.addaudithook(killing)
with complete_folder(Path(sys.argv[1]), "a model folder", Path.is_dir, ["config.json"]) as folder:
    (folder / "config.json").write_text("new")
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_what_a_user_put_into_a_folder_survives_a_kill_while_it_is_replaced(moment: int, tmp_path: Path) -> None:
    folder, own = tmp_path / "model", {"README.md": "mine", "notes/today.txt": "mine"}
    for name, text in {**own, "config.json": "old"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "link").symlink_to("nowhere")
    program = [sys.executable, "-c", KILLED, str(folder)]
    assert subprocess.run([*program, str(moment)], check=False).returncode == -signal.SIGKILL
    assert folder.exists() == (moment != 2)  # between the two renames it is neither the old nor the new one
    for name in own if folder.exists() else ():
        assert (folder / name).read_text() == "mine"
    # One that is being removed has no name by which it would be brought back.
    assert {path.suffix for path in tmp_path.glob(".model.*")} == [{".tmp"}, {".tmp", ".old"}, {".old"}, {".tmp"}][
        moment - 1
    ]
    subprocess.run([*program, "0"], check=True)
    assert {name: (folder / name).read_text() for name in [*own, "config.json"]} == {**own, "config.json": "new"}
    assert (folder / "link").is_symlink()


def test_a_model_whose_label_cannot_be_read_for_a_moment_is_replaced_and_not_taken_for_another_program_s(
    save_small_model: Save,
) -> None:
    saved = save_small_model()
    saved.information = replace(saved.information, step=2400)
    with stuttering(errno.EIO, {"config.json"}, FOR_GOOD), pytest.raises(MachineError, match="cannot be read now"):
        saved.save()
    with stuttering(errno.EIO, {"config.json"}):
        saved.save()
    with stuttering(errno.EIO, {"config.json"}):
        assert load_model_folder(saved.folder).information.step == 2400


def test_folders_that_killed_processes_left_go_after_a_day(
    save_small_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_small_model()
    left = [saved.folder.with_name(name) for name in (".model.4711.tmp", ".model.4712.old", ".models.4711.tmp")]
    for folder in left:
        folder.mkdir()
        (folder / "model.safetensors").touch()
    saved.save()
    assert all(folder.is_dir() for folder in left)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    saved.save()
    assert sorted(path.name for path in saved.folder.parent.iterdir()) == [".models.4711.tmp", "model"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "source.model"])
def test_a_missing_file_is_named(name: str, save_small_model: Save) -> None:
    folder = save_small_model().folder
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{folder} is not a complete model folder: {name} is missing"):
        load_model_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "source.model", "target.model"])
def test_a_model_that_is_closed_to_this_user_is_no_fault_of_its_disk(name: str, save_small_model: Save) -> None:
    """It is refused at once: nobody opens it meanwhile."""
    folder = save_small_model().folder
    with stuttering(errno.EACCES, {name}), pytest.raises(PermissionError, match=name):
        (tokenizer_files if name.endswith(".model") else load_model_folder)(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a complete model folder"):
        load_model_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_weights_cut_short_are_said_to_be(share: float, save_small_model: Save) -> None:
    path = save_small_model().folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or cut short"):
        load_model_folder(path.parent)


def changed_weights(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    weights = load_file(path)
    weights.pop(name, None)
    save_file(weights if tensor is None else {**weights, name: tensor}, path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("decoder_layers.1.cross_attention.query.weight", None, r"decoder_layers\.1\.\S+ is missing"),
        ("stranger", torch.zeros(2), "stranger is not in the model"),
        ("source_embedding.weight", torch.zeros(3, 8), r"source_embedding.weight is \(3, 8\), expected \(16, 8\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    name: str, tensor: torch.Tensor | None, message: str, save_small_model: Save
) -> None:
    path = save_small_model().folder / "model.safetensors"
    changed_weights(path, name, tensor)
    with pytest.raises(CheckpointError, match=message):
        load_model_folder(path.parent)


def test_weights_of_another_configuration_cannot_be_saved(save_small_model: Save) -> None:
    saved = save_small_model()
    weights = dict(saved.model.named_parameters())
    del weights["source_embedding.weight"]
    with pytest.raises(CheckpointError, match=r"source_embedding\.weight is missing"):
        save_model_folder(saved.folder, weights, saved.config, saved.tokenizer_files, saved.information)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:40], "not the configuration of a model folder"),
        (lambda text: "[]", "not the configuration of a model folder"),
        (
            lambda text: text.replace("dist-transformer", "other"),
            "expected label dist-transformer and format 1, found other",
        ),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format 1, found dist-transformer and 2"),
        (lambda text: text.replace('"eos_id": 2', '"eos_id": "2"'), "eos_id is '2', expected int"),
        (lambda text: text.replace('"eos_id"', '"end"'), "end"),
        (lambda text: text.replace('"d_ff": 12', '"d_ff": -12'), "d_ff"),
        (lambda text: text.replace('"num_heads": 2', '"num_heads": 3'), "3 heads do not divide d_model 8"),
        (lambda text: text.replace('"sinusoidal"', '"learned"'), "got none with model.positions learned"),
        (
            lambda text: text.replace('"sinusoidal"', '"rotary"').replace('"key_size": null', '"key_size": 3'),
            "heads need keys of an even size, got 3",
        ),
        (lambda text: text.replace('"relu"', '"tanh"'), "activation"),
    ],
)
def test_an_unreadable_configuration_is_named(
    change: Callable[[str], str], message: str, save_small_model: Save
) -> None:
    path = save_small_model().folder / "config.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model_folder(path.parent)
    assert str(path) in str(caught.value)


def test_the_configuration_says_what_the_folder_is(save_small_model: Save) -> None:
    content = json.loads((save_small_model().folder / "config.json").read_text())
    assert (content["label"], content["format"]) == ("dist-transformer", 1)
    assert content["model"]["d_model"] == 8
    assert (content["source_language"], content["target_language"], content["step"]) == ("en", "de", 1200)
