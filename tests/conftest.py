"""Shared by all tests: the command as a user runs it, and a small real corpus to run it on."""

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from command_server import quick_command
from running import NOT_INHERITED, Command, without

from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.processes.stop_request import STOP_SIGNALS

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks of a test share two cores
# Tests compare what CPUs compute, on several ranks; benchmarks/gpu.py --acceptance is the test of a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("DIST_TRANSFORMER_TEST_GPUS", "")
os.environ["DIST_TRANSFORMER_FP16_ON_CPU"] = "1"  # what fp16 does in a step is tested without a GPU
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy moment is no failure
hypothesis.settings.load_profile("any machine")
# Started by nohup or in the background, tests inherit ignored signals, and so would the processes they signal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
HANDLERS = {number: signal.getsignal(number) for number in STOP_SIGNALS}


@pytest.fixture(autouse=True)
def no_handler_of_a_command() -> Iterator[None]:
    """Puts back the handlers of signals: those of a command that a test called in this process would swallow a Ctrl-C."""
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python's garbage collector leaves out what is collected here: it looked through these modules and thousands of items
    again and again, which took as long as all else of the collection, in each process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests run in one process, those of Slurm in two, with a cluster each. What takes long is begun first."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    for item in items:
        name = item.nodeid.split("::")[0]
        of_slurm = "slurm: nodes that die" if "survival" in name or "newer" in name else "slurm"
        group = of_slurm if item.get_closest_marker("slurm") else name
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: (item.get_closest_marker("slurm") is None, item.path not in slow))


SMALL_RUN = """
run: {{name: small, root: {root}/runs, seed: 3}}
data:
  root: {root}
  train: {{source: train.en, target: train.de}}
  validation: {{source: valid.en, target: valid.de}}
  test: {{source: valid.en, target: valid.de}}
  filters: {{max_tokens: 96}}
  lanes: 4
  max_tokens: 512
  window_rows: 60
  row_group_rows: 64
  loader_workers: 0
tokenizer: {{vocabulary_size: 200}}
model: {{preset: tiny, d_model: 32, d_ff: 64, num_encoder_layers: 1, num_decoder_layers: 1, dropout: 0.1}}
optimizer: {{learning_rate: 0.01}}
schedule: {{warmup_steps: 4}}
training: {{max_steps: 6, precision: fp32, log_every_steps: 1, hang_seconds: 120}}
validation: {{every_steps: 100, translate: false}}
checkpoints: {{every_steps: 3, keep_last: 3, average_last: 2}}
tracking: {{enabled: false}}
"""


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.en, train.de (600 pairs), valid.en, valid.de (40 pairs) and small.yaml.

    Of one test file: a name of a run used in two files is two runs, whichever files share a process.
    """
    folder = tmp_path_factory.mktemp("small")
    pairs = [pair for _, pair in zip(range(600), demo_pairs("train"), strict=False)]
    held_out = [pair for _, pair in zip(range(40), demo_pairs("validation"), strict=False)]
    for name, rows in (("train", pairs), ("valid", held_out)):
        (folder / f"{name}.en").write_text("".join(f"{s}\n" for s, _ in rows), encoding="utf-8")
        (folder / f"{name}.de").write_text("".join(f"{t}\n" for _, t in rows), encoding="utf-8")
    (folder / "small.yaml").write_text(SMALL_RUN.format(root=folder), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def quick_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The command by a server that has imported it: 3 CPU-seconds less a start, of which the tests make hundreds."""
    folder = tmp_path_factory.mktemp("quick")
    with quick_command(folder, without(NOT_INHERITED)):
        yield folder / "dist-transformer"


@pytest.fixture(scope="module")
def command(small_corpus: Path, quick_client: Path) -> Iterator[Command]:
    """The command, started in the folder of `small_corpus`."""
    command = Command(small_corpus, quick_client)
    yield command
    command.kill_what_is_left()


@pytest.fixture(scope="module")
def train_small(command: Command) -> Callable[..., Path]:
    """Trains small.yaml under a name; gives the run folder."""

    def train(name: str, *overrides: str, ranks: int = 1, code: int = 0, **environment: str) -> Path:
        command("train", "small.yaml", f"run.name={name}", *overrides, "--ranks", ranks, code=code, **environment)
        return command.folder / "runs" / name

    return train
