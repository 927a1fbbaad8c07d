"""How a run starts: with weights of another one, with a dry run of the largest micro-batch, with a size that fits."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import NOT_INHERITED, without
from safetensors.torch import load_file

from dist_transformer.config.data_schema import DataConfig
from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training.batch_size_finder import largest_shapes
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.tensor_files import Weights
from dist_transformer.training.init_from import find

pytestmark = pytest.mark.slow
FAULTY_TRAIN = Path(__file__).parents[1] / "distributed" / "faulty_train.py"

STANDING_STILL = ("training.max_steps=1", "schedule.warmup_steps=1", "optimizer.learning_rate=1e-12")
"""One step that moves no weight by more than 1e-11."""


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of a model folder or a checkpoint."""
    file = folder / "model.safetensors"
    return load_file(file) if file.exists() else dict(Weights(folder))


def newest(run: Path) -> Path:
    return checkpoints.saved(RunDir(run))[-1]


def refused(command, *arguments, **keywords) -> str:
    said = command("train", "small.yaml", *arguments, code=2, **keywords)
    assert "Traceback" not in said
    return said


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance, name


@pytest.fixture(scope="module")
def origin(train_small) -> Path:
    """A finished run of 6 steps with checkpoints of steps 3 and 6, and a model that is their average."""
    return train_small("origin")


def test_a_run_starts_with_the_model_of_another_run(train_small, origin):
    run = train_small("child", f"training.init_from={origin}", *STANDING_STILL, ranks=2)
    assert_same_weights(weights_of(newest(run)), weights_of(origin / "model"), 1e-11)
    assert f"{origin / 'model'}" in (run / "train.log").read_text()


def test_of_a_run_without_a_model_the_newest_whole_checkpoint_is_taken_as_if_it_were_named_and_the_other_run_left_alone(
    train_small, origin, tmp_path
):
    shutil.copytree(origin, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "model")
    (damaged,) = (tmp_path / "copy" / "checkpoints" / "step_00000006").glob("state_*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    before = sorted(path for path in (tmp_path / "copy").rglob("*"))
    run = train_small("child-of-run", f"training.init_from={tmp_path / 'copy'}", *STANDING_STILL)
    checkpoint = tmp_path / "copy" / "checkpoints" / "step_00000003"
    assert find(tmp_path / "copy") == find(checkpoint)
    assert_same_weights(weights_of(newest(run)), weights_of(checkpoint), 1e-11)
    assert sorted(path for path in (tmp_path / "copy").rglob("*")) == before
    assert "step_00000006 is damaged" in (run / "train.log").read_text()


def test_a_resume_does_not_look_at_init_from(train_small, origin, tmp_path):
    shutil.copytree(origin / "model", tmp_path / "model")
    options = (f"training.init_from={tmp_path / 'model'}", "schedule.name=constant", "schedule.warmup_steps=1")
    straight = train_small("straight-from-model", *options, "training.max_steps=2")
    stopped = train_small("stopped-from-model", *options, "training.max_steps=1")
    shutil.rmtree(tmp_path / "model")
    train_small("stopped-from-model", *options, "training.max_steps=2")
    assert_same_weights(weights_of(newest(stopped)), weights_of(newest(straight)))


def test_weights_of_another_tokenizer_are_refused_on_all_ranks_with_one_message(command, origin):
    said = refused(
        command, "run.name=other-pieces", f"training.init_from={origin}", "tokenizer.vocabulary_size=264", "--ranks", 2
    )
    assert "source_embedding: weight" in said
    assert "of another tokenizer" in said
    assert said.count("training.init_partially=true") == 1 + said.count("failed: training.init_from")  # and in the log


def test_what_fits_is_taken_and_the_rest_is_named_in_the_log(train_small, origin):
    run = train_small(
        "grown", f"training.init_from={origin}", "training.init_partially=true", "model.num_decoder_layers=2",
        *STANDING_STILL,
    )  # fmt: skip
    found, expected = weights_of(newest(run)), weights_of(origin / "model")
    assert_same_weights({name: found[name] for name in expected}, expected, 1e-11)
    (line,) = [line for line in (run / "train.log").read_text().splitlines() if "decoder_layers.1: " in line]
    new = {name.removeprefix("decoder_layers.1.") for name in found.keys() - expected.keys()}
    assert set(line.split(": ")[-1].split(", ")) == new


def test_a_run_is_the_same_with_and_without_its_dry_run(train_small, command):
    settings = ("training.precision=fp16", "training.zero_stage=3", "schedule.warmup_steps=1", "training.max_steps=3")
    tried = train_small("tried", *settings, ranks=2)
    arguments = ("no dry run", "all", "small.yaml", "run.name=untried", *settings, "2")
    code, said = command.program(FAULTY_TRAIN, *arguments)
    assert code == 0, said
    untried = command.folder / "runs" / "untried"
    files = sorted(path.name for path in newest(tried).glob("state_*.safetensors"))
    assert len(files) == 2
    for name in files:
        found, expected = load_file(newest(tried) / name), load_file(newest(untried) / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    data = DataConfig(train={"demo": "train"}, max_tokens=512, filters={"max_tokens": 96})
    shapes = ", ".join(map(str, largest_shapes(data)))
    assert f"dry run    of the largest micro-batches, {shapes}: " in (tried / "train.log").read_text()
    assert "dry run" not in (untried / "train.log").read_text()


def test_a_run_goes_on_in_the_precision_that_it_began_with_and_config_yaml_says_which(train_small, command):
    """`auto` is settled at the first start: on CPUs it is fp32."""
    for given, steps, expected in (("auto", (4,), "fp32"), ("bf16", (4, 6), "bf16")):
        for precision, max_steps in zip((given, "auto"), steps, strict=False):
            run = train_small(f"began-{given}", f"training.precision={precision}", f"training.max_steps={max_steps}")
            assert load_config(run / "config.yaml", check_files=False).training.precision == expected
        said = (run / "train.log").read_text()
        assert (f"precision  {expected}, what training.precision: auto is on CPUs" in said) is (given == "auto")
        assert read_json(newest(run) / "state.json")["precision"] == expected


def test_fp16_without_a_gpu_is_refused_before_the_corpus_is_prepared(command):
    given = ("run.name=half", "training.precision=fp16", "data.window_rows=61")
    said = refused(command, *given, DIST_TRANSFORMER_FP16_ON_CPU="")
    assert "training.precision: expected fp32 or bf16" in said
    assert "prepar" not in said
    assert not (command.folder / "runs" / "half").exists()


LIMITED = 'ulimit -v {kilobytes} && exec "$0" -m dist_transformer train small.yaml "$@"'


def under_limit(command, kilobytes: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", LIMITED.format(kilobytes=kilobytes), sys.executable, *overrides],
        cwd=command.folder, env=without(NOT_INHERITED), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_micro_batches_too_large_for_memory_end_the_run_before_its_first_step_with_the_way_out(command, origin):
    done = under_limit(command, 4_000_000, "run.name=too-large", "data.max_tokens=4000000")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "out of memory in the dry run of the largest micro-batch, 20833 x (96 + 96) tokens" in done.stderr
    assert "Lower data.max_tokens" in done.stderr
    assert not list((command.folder / "runs" / "too-large").glob("checkpoints/step_*"))


def test_auto_finds_a_size_that_trains_within_the_limit_and_keeps_it_at_a_resume(command, origin):
    settings = ("run.name=auto", "data.max_tokens=auto", "model.d_ff=8192", "schedule.warmup_steps=1")
    out_of_memory = load_config(command.folder / "small.yaml", [*settings, "data.max_tokens=4000000"])
    (command.folder / "runs" / "auto").mkdir(parents=True)  # as a start leaves it that ended before its first step
    (command.folder / "runs" / "auto" / "config.yaml").write_text(to_yaml(out_of_memory), encoding="utf-8")
    first = under_limit(command, 3_600_000, *settings, "training.max_steps=1")
    assert first.returncode == 0, first.stderr
    run = command.folder / "runs" / "auto"
    found = read_json(newest(run) / "state.json")["recipe"]["data.max_tokens"]
    assert f"max_tokens {found:,} found" in first.stderr
    assert 2 * 96 <= found < 65_536
    command("train", "small.yaml", *settings, "training.max_steps=2")
    assert read_json(newest(run) / "state.json")["recipe"]["data.max_tokens"] == found
    assert (run / "train.log").read_text().count("found: ") == 1


def test_training_that_is_started_with_closed_streams_trains(command):
    train = f"{sys.executable} -m dist_transformer train small.yaml run.name=closed --ranks 2"
    started = ["bash", "-c", f"exec {train} <&- >&- 2>&-"]
    environment = {**without(NOT_INHERITED), "PYTHONPATH": str(FAULTY_TRAIN.parents[2])}
    assert subprocess.run(started, cwd=command.folder, env=environment, timeout=600, check=False).returncode == 0
    assert (RunDir(command.folder / "runs" / "closed").model / "model.safetensors").is_file()
