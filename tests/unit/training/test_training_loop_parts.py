"""Small pure parts of the loop and the stop request."""

import os
import signal
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.config.schema import Config
from dist_transformer.data.prepare.progress import prepare_with_progress
from dist_transformer.errors import EXIT_REQUEUE
from dist_transformer.processes.stop_request import STOP_SIGNALS, StopRequest
from dist_transformer.training.train_state import dropout_seed


@given(st.integers(0, 2**63), st.integers(0, 10**9), st.integers(0, 4096))
def test_any_seed_gives_a_dropout_seed_that_torch_takes(seed, batches, lane):
    torch.manual_seed(dropout_seed(seed, batches, lane))


def test_dropout_masks_differ_by_seed_batch_and_lane_where_torch_takes_32_bits_of_the_seed():
    names = [(s, b, n) for s in range(3) for b in (*range(15), *range(65_530, 65_545), 2**32) for n in range(10)]
    torch.manual_seed(5)
    of_low_bits = torch.rand(4)
    torch.manual_seed(2**32 + 5)
    assert torch.equal(torch.rand(4), of_low_bits), "this test looks at the bits that torch takes on CPUs"
    assert len({dropout_seed(*name) % 2**32 for name in names}) == len(names)


@pytest.fixture
def stop():
    """A listening stop request."""
    request = StopRequest()
    request.listen()
    return request


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_request_that_names_it(stop, number):
    assert stop.reason() is None
    os.kill(os.getpid(), number)
    assert stop.reason() == f"signal {number.name}"


def test_a_stop_file_from_before_is_removed_and_a_new_one_is_a_request(stop, tmp_path):
    file = tmp_path / "stop"
    file.touch()
    os.utime(file, (time.time() - 60, time.time() - 60))
    stop.watch_file(file)
    assert stop.reason() is None
    file.touch()
    assert stop.reason() == f"file {file}"


def test_a_stop_request_ends_the_preparation_of_a_corpus(stop, tmp_path, capsys):
    os.kill(os.getpid(), signal.SIGTERM)
    config = Config.model_validate({"data": {"train": {"demo": "validation"}}, "run": {"root": str(tmp_path)}})
    with pytest.raises(SystemExit) as ended:
        prepare_with_progress(config, stop)
    assert ended.value.code == EXIT_REQUEUE
    assert "stopped while preparing the corpus (signal SIGTERM)" in capsys.readouterr().err
