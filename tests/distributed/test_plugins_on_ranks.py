"""Plug-ins on real ranks: the shipped decoder-only model is trained, killed, resumed on other ranks and translated with."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from running import Command, kill_ranks, records, wait_for_step
from safetensors.torch import load_file
from test_resume import FAULTY

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow

STEPS = ("training.max_steps=12", "checkpoints.every_steps=4")


@pytest.fixture(scope="module")
def model(command: Command) -> str:
    """The example, copied beside the run's YAML, and its name in `model.plugin`."""
    shutil.copy(EXAMPLES / "decoder_only.py", command.folder)
    return "model.plugin=decoder_only.py:build"


@pytest.fixture(scope="module")
def undisturbed(train_small: Callable[..., Path], model: str) -> Path:
    return train_small(
        "undisturbed",
        model,
        *STEPS,
        "validation.every_steps=12",
        "validation.translate=true",
        "validation.max_sentences=4",
        ranks=2,
    )


def test_the_run_learns_and_validates_with_translations(undisturbed: Path):
    losses = [record["loss"] for record in records(undisturbed)]
    assert losses[-1] < losses[0]
    (validation,) = records(undisturbed, "validation")
    assert {"loss", "token_accuracy", "bleu"} <= validation.keys()


def test_a_killed_run_resumes_to_the_same_weights_and_then_in_other_stages_on_other_ranks_on_the_same_batches(
    train_small, command: Command, model, undisturbed
):
    run = command.folder / "runs" / "elastic"
    settings = ("small.yaml", "run.name=elastic", model, *STEPS)
    process = command.start_program(FAULTY, "waits for a signal", "all", *settings, 2)
    wait_for_step(run, 5)
    kill_ranks(process)
    process.communicate(timeout=240)
    assert not (run / "model").exists()
    for steps, ranks, stage in ((8, 2, 1), (10, 3, 2), (11, 2, 3), (12, 1, 0)):
        overrides = (f"training.max_steps={steps}", f"training.zero_stage={stage}")
        train_small("elastic", model, *STEPS, *overrides, ranks=ranks)
        if steps == 8:  # so far on the ranks and in the stage of the undisturbed run
            for file in (undisturbed / "checkpoints" / "step_00000008").glob("state_*.safetensors"):
                assert (run / "checkpoints" / "step_00000008" / file.name).read_bytes() == file.read_bytes()
    found, expected = records(run), records(undisturbed)
    assert [r["batch_digest"] for r in found] == [r["batch_digest"] for r in expected]
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in expected], rel=1e-3)


@pytest.mark.parametrize(("precision", "stage"), [("bf16", 3), ("fp16", 2)])
def test_16_bit_types_train_it_too(train_small, model, precision, stage):
    overrides = (f"training.precision={precision}", f"training.zero_stage={stage}", "training.max_steps=4")
    run = train_small(f"{precision}-{stage}", model, *overrides, ranks=2)
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4]
    assert {str(t.dtype) for t in load_file(run / "model/model.safetensors").values()} == {"torch.float32"}


TIED = """import torch
from torch import nn
class build(nn.Module):
    def __init__(self, config, source_vocabulary, target_vocabulary, pad_id):
        super().__init__()
        size = config.d_model
        self.embedding, self.out = nn.Embedding(target_vocabulary, size), nn.Linear(size, target_vocabulary)
        self.source, self.target = nn.GRU(size, size, batch_first=True), nn.GRU(size, size, batch_first=True)
        self.out.weight = self.embedding.weight
        self.rates, self.table = [each.item() for each in torch.linspace(0, 1, 4)], torch.linspace(0, 1, size)
    def forward(self, source, target):
        first = self.source(self.embedding(source))[0].mean(1, keepdim=True) * self.rates[3]
        return self.out(self.target(self.embedding(target) + first + self.table)[0])
"""


def test_tied_weights_and_values_computed_when_built_are_those_of_translations_in_every_stage(train_small, command):
    (command.folder / "tied.py").write_text(TIED, encoding="utf-8")
    settings = (
        "model.plugin=tied.py:build",
        "training.max_steps=6",
        "validation.every_steps=6",
        "validation.translate=true",
    )
    runs = [train_small(f"tied-{stage}", *settings, f"training.zero_stage={stage}", ranks=2) for stage in (1, 3)]
    expected, found = (records(run, "validation")[-1] for run in runs)
    assert expected["chrf"] > 0
    for measure in ("loss", "chrf"):
        assert found[measure] == pytest.approx(expected[measure], rel=0.02)
    lines = "The train leaves.\n\n"
    translated = [command("translate", run, "--plugin", "tied.py:build", text=lines) for run in runs]
    assert translated[0] == translated[1]
    assert len(translated[0].splitlines()) == 2


def test_a_model_folder_executes_its_code_only_if_the_user_names_that_file(command: Command, undisturbed: Path):
    refused = command("translate", undisturbed, code=2, text="The train leaves.\n")
    assert "--plugin FILE:NAME" in refused
    assert "Traceback" not in refused
    out = command("translate", undisturbed, "--plugin", "decoder_only.py:build", text="The train leaves.\n\n")
    assert len(out.splitlines()) == 2
    other = command.folder / "other.py"
    other.write_text("raise SystemExit('executed')\ndef build(): ...\n", encoding="utf-8")
    refused = command("translate", undisturbed, "--plugin", "other.py:build", code=2, text="The train leaves.\n")
    assert "SHA-256" in refused
    assert "executed\n" not in refused
    exported = command("export", undisturbed, command.folder / "exported", "--to", "ctranslate2", code=2)
    assert "other commands take models of this program only" in exported
    command("evaluate", undisturbed, "--plugin", "decoder_only.py:build")


def test_a_changed_or_missing_file_is_one_message_on_resume_and_average_executes_none(train_small, command: Command):
    moved = command.folder / "moved.py"
    shutil.copy(EXAMPLES / "decoder_only.py", moved)
    run = train_small("changed", "model.plugin=moved.py:build", "training.max_steps=4")
    moved.write_text(moved.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    out = command("train", run, "training.max_steps=6", code=2)
    assert "model.plugin" in out
    assert "SHA-256" in out
    assert "Traceback" not in out
    moved.write_text("raise SystemExit(9)\ndef build(): ...\n", encoding="utf-8")
    command("average", run, "--output", command.folder / "averaged")
    assert (command.folder / "averaged" / "plugin.py").read_bytes() == (EXAMPLES / "decoder_only.py").read_bytes()
    moved.unlink()
    out = command("train", run, "training.max_steps=6", code=2)
    assert f"no such file: {moved}" in out
    assert "Traceback" not in out


FORWARD = """import torch
class build(torch.nn.Module):
    def __init__(self, *_):
        super().__init__(); self.part = torch.nn.Linear(3, 3)
    def forward(self, source, target):
        return {}
"""


@pytest.mark.parametrize(
    ("code", "message", "num_ranks"),
    [
        ("def build(*_):\n    return 3\n", "returned int, expected a torch.nn.Module", 1),
        ("def build(*_):\n    raise KeyError('mine')\n", "line 2: KeyError: 'mine'", 1),
        ("import torch\nbuild = lambda *_: torch.nn.BatchNorm1d(3)\n", "buffers (running_mean", 1),
        ("import torch\nbuild = lambda *_: torch.nn.Identity()\n", "nothing to train", 1),
        (
            "import torch\nbuild = lambda *_: torch.nn.LazyLinear(3)\n",
            "returned weight, bias, expected parameters of real",
            1,
        ),
        (
            FORWARD.format("self.part").replace("Linear(3, 3)", "Parameter(torch.tensor(1.0))"),
            "returned part, expected",
            1,
        ),
        ("import nowhere\ndef build(): ...\n", "line 1: ModuleNotFoundError", 1),
        (FORWARD.format("self.part(target.float())"), "build of {file}, line 6: RuntimeError: mat1 and mat2", 2),
        (
            "import os\nassert os.environ['RANK'] != '1', 'no such GPU'\n" + FORWARD,
            "line 2: AssertionError: no such GPU",
            2,
        ),
        (FORWARD.format("exit(3)"), "build of {file}, line 6: SystemExit: 3; mend the plug-in", 1),
        (FORWARD.format("self.part").replace("def forward", "def unused"), "module.py, line", 1),
        (
            FORWARD.format("(source, target)"),
            "build of {file}: forward returned tuple, expected a tensor of shape (",
            1,
        ),
        (FORWARD.format("self.part.weight"), "build of {file}: forward returned a tensor of shape (3, 3), expected", 1),
        (
            FORWARD.format("torch.zeros(*target.shape, 200).long()"),
            "200) (torch.int64, requires_grad=False), expected",
            1,
        ),
        (FORWARD.format("torch.zeros(*target.shape, 200)"), "200) (torch.float32, requires_grad=False), expected", 1),
    ],
)
def test_code_that_cannot_be_trained_is_one_message(command: Command, undisturbed: Path, code, message, num_ranks):
    (command.folder / "wrong.py").write_text(code, encoding="utf-8")
    shutil.rmtree(command.folder / "__pycache__", ignore_errors=True)  # of code of this size in the same second
    wrong = ("run.name=wrong", "model.plugin=wrong.py:build")
    out = command("train", "small.yaml", *wrong, "--ranks", num_ranks, code=2)
    assert message.format(file=command.folder / "wrong.py") in out
    assert "Traceback" not in out


FILTER = "data.filters.plugin=keep_numbers.py:keep"


def dropped_by(command: Command) -> int:
    """The number of training pairs that the shipped filter drops, counted without the program."""
    numbers = [
        [
            sorted(re.findall(r"\d+", line))
            for line in (command.folder / f"train.{side}").read_text("utf-8").splitlines()
        ]
        for side in ("en", "de")
    ]
    return sum(source != target for source, target in zip(*numbers, strict=True))


@pytest.mark.parametrize("on_the_fly", ["false", "true"])
def test_the_filter_drops_pairs_counts_them_and_resumes_on_other_ranks(train_small, command: Command, on_the_fly):
    shutil.copy(EXAMPLES / "keep_numbers.py", command.folder)
    expected = dropped_by(command)
    assert 0 < expected < 600
    overrides = (FILTER, f"data.on_the_fly={on_the_fly}", "data.loader_workers=1", "training.max_steps=6")
    whole = train_small(f"filtered-{on_the_fly}", *overrides, ranks=2)
    cut = train_small(f"filtered-cut-{on_the_fly}", *overrides, "training.max_steps=4", ranks=1)
    cut = train_small(f"filtered-cut-{on_the_fly}", *overrides, ranks=3)
    assert [r["batch_digest"] for r in records(cut)] == [r["batch_digest"] for r in records(whole)]
    config = yaml.safe_load((whole / "config.yaml").read_text("utf-8"))
    report = json.loads((Path(config["data"]["prepared"]) / "report.json").read_text("utf-8"))
    assert report["corpora"]["train"]["dropped"]["plugin"] == expected
    assert report["plugin"] == "keep_numbers.py:keep"


def test_a_changed_filter_and_one_that_raises_are_one_message(train_small, command: Command):
    rule = command.folder / "rule.py"
    rule.write_text("def keep(source, target):\n    return True\n", encoding="utf-8")
    overrides = ("data.filters.plugin=rule.py:keep", "training.max_steps=4")
    run = train_small("rule", *overrides)
    rule.write_text("def keep(source, target):\n    return len(source) > 10\n", encoding="utf-8")
    out = command("train", run, "training.max_steps=6", code=2)
    assert "filters.plugin" in out
    assert "Traceback" not in out
    rule.write_text("def keep(source, target):\n    return source.words\n", encoding="utf-8")
    out = command("train", "small.yaml", "run.name=raising", *overrides, code=2)
    assert f"keep of {rule}, line 2: AttributeError" in out
    assert "Traceback" not in out
