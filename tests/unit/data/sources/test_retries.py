"""A read is tried again after what may pass, with growing pauses, and only after that."""

from collections.abc import Callable
from unittest.mock import patch

import aiohttp
import pyarrow as pa
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from dist_transformer.data.sources import retries


class Failing:
    """Raises the given exceptions in turn, then returns 7."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", found.append)
    return found


def with_retries(read: Failing, attempts: int, warn: Callable[[str], None] = lambda reason: None) -> int:
    with patch.object(retries, "READ_ATTEMPTS", attempts):
        return retries.with_retries(read, warn)


def test_pauses_double_from_a_tenth_of_a_second_to_five_seconds(pauses):
    assert with_retries(Failing(*[OSError()] * 9), 10) == 7
    formula = [min(5.0, 0.1 * 2**i) for i in range(9)]
    assert all(least <= pause <= least + 0.1 for least, pause in zip(formula, pauses, strict=True))


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("gone"),
        TimeoutError(),
        ConnectionResetError("reset"),
        EOFError("short"),
        pa.ArrowInvalid("bad page"),
        aiohttp.ClientPayloadError("half an answer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_disks_networks_and_damaged_files_raise_is_tried_again(pauses, error):
    read = Failing(error, error)
    assert with_retries(read, 3) == 7
    assert read.calls == 3


def test_the_last_failure_is_raised(pauses):
    read = Failing(OSError("first"), OSError("second"), OSError("third"))
    with pytest.raises(OSError, match="second"):
        with_retries(read, 2)
    assert read.calls == 2


def test_a_single_attempt_pauses_never(pauses):
    with pytest.raises(EOFError):
        with_retries(Failing(EOFError()), 1)
    assert pauses == []


def test_a_mistake_of_the_program_is_not_tried_again(pauses):
    read = Failing(KeyError("row_id"))
    with pytest.raises(KeyError):
        with_retries(read, 5)
    assert read.calls == 1


def test_the_hub_is_not_asked_again_where_it_may_not_be_asked_at_all(pauses):
    for error in (OfflineModeIsEnabled("offline mode is enabled"), ConnectionError("no Hub (OfflineModeIsEnabled)")):
        read = Failing(error)
        with pytest.raises(ConnectionError):
            with_retries(read, 5)
        assert read.calls == 1
    assert pauses == []


def test_each_failed_attempt_is_told_once_with_its_reason_and_the_pause(pauses):
    told: list[str] = []
    with_retries(Failing(OSError("disk\n  busy"), TimeoutError()), 4, told.append)
    assert told == [
        f"disk busy; attempt 1 of 4, again in {pauses[0]:.1f} s",
        f"TimeoutError; attempt 2 of 4, again in {pauses[1]:.1f} s",
    ]
