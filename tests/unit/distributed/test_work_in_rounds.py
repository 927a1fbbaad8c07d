"""Work that is dealt out in rounds: all ranks leave it together, whichever of them fails or is asked to stop, and when."""

from collections import Counter
from functools import partial

import pytest
import torch
from checkpoint_helpers import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_transformer.distributed.rounds import Stopped, WorkFailed, failures_named, in_rounds, together
from dist_transformer.errors import CheckpointError, ConfigError, MachineError, UserError

TAKES_PART = ("works", "fails", "wants to stop", "stops in its middle")


def attempt(ranks, deeds: list[str]) -> tuple[str, list[int]]:
    """How the rounds ended on a rank that does `deeds`, one a round, and which of them it has begun."""
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        with failures_named(ranks):
            if deeds[number] == "fails":
                raise torch.OutOfMemoryError("tried to allocate 1 GiB")
            if deeds[number] == "stops in its middle":
                raise Stopped

    def wants_stop() -> bool:
        return "wants to stop" in deeds[: len(begun) + 1]

    try:
        in_rounds(ranks, len(deeds), work, wants_stop)
    except (Stopped, WorkFailed) as ended:
        return f"{type(ended).__name__} {ended}", begun
    return "done", begun


DEEDS = st.lists(st.sampled_from(TAKES_PART), min_size=5, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(DEEDS, min_size=1, max_size=3))
def test_all_ranks_end_alike_at_most_a_round_after_the_first_that_leaves(deeds):
    found = on_ranks(len(deeds), lambda ranks: attempt(ranks, deeds[ranks.rank]))
    leaving = [number for number in range(5) if any(of_rank[number] != "works" for of_rank in deeds)]
    assert len({ended for ended, _ in found}) == 1
    assert (found[0][0] == "done") == (not leaving)
    last = min(leaving[0] + 1, 4) if leaving else 4
    for (_, begun), of_rank in zip(found, deeds, strict=True):
        assert begun == list(range(len(begun)))
        own_end = next((number for number in range(5) if of_rank[number] in TAKES_PART[1::2]), 5)
        assert len(begun) <= last + 1
        if own_end > last:  # who has not failed itself goes on until all leave: its work may be a collective
            assert len(begun) == last + 1


def test_a_failure_names_its_rank_and_is_a_stop_where_both_come():
    outcomes = {"fails": "WorkFailed rank 1: OutOfMemoryError: tried to allocate 1 GiB", "works": "done"}
    for deed, expected in outcomes.items():
        found = on_ranks(2, lambda ranks, deed=deed: attempt(ranks, ["works", deed if ranks.rank else "works"]))
        assert Counter(ended for ended, _ in found) == {expected: 2}
    both = (["fails"], ["wants to stop"])
    assert {ended for ended, _ in on_ranks(2, lambda ranks: attempt(ranks, both[ranks.rank]))} == {"Stopped "}


def test_what_a_user_can_mend_is_told_in_its_own_words(ranks):
    with pytest.raises(WorkFailed, match="rank 0: lower it"), failures_named(ranks):
        raise UserError("lower it")


def test_nothing_to_do_is_done_at_once(ranks):
    in_rounds(ranks, 0, lambda number: 1 // 0, lambda: True)


def test_a_refusal_of_one_rank_is_raised_by_all_and_each_message_is_said_once():
    def attempt(refusals: list[UserError | None], ranks) -> tuple[str, bool, bool] | int:
        def work() -> int:
            if (refusal := refusals[ranks.rank]) is not None:
                raise refusal
            return ranks.rank

        try:
            return together(ranks, work)
        except UserError as error:
            return str(error), error.is_agreed, isinstance(error, MachineError)

    def answers(*refusals: UserError | None) -> list[tuple[str, bool, bool] | int]:
        return on_ranks(len(refusals), partial(attempt, list(refusals)))

    assert answers(None, None, None) == [0, 1, 2]
    assert answers(None, CheckpointError("other lanes"), None) == [("other lanes", True, False)] * 3
    assert answers(ConfigError(["a"]), ConfigError(["a"])) == [(str(ConfigError(["a"])), True, False)] * 2
    assert answers(MachineError("disk"), MachineError("net")) == [("disk\nnet", True, True)] * 2
    assert answers(MachineError("disk"), UserError("lanes")) == [("disk\nlanes", True, False)] * 2
    told = answers(*(UserError(f"of rank {rank}") for rank in range(5)))[0]
    assert told == ("of rank 0\nof rank 1\nof rank 2\nand 2 other refusals", True, False)
