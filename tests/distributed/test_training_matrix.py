"""Stages x precisions x options x ranks: the same losses as plain torch, the same page as in the docs."""

import re
from typing import Any

import matrix_program
import pytest
from matrix_program import CLIP, COMBINATIONS, PAGE, SKIPPED_AFTER, Combination, deviation, launch, page, reference
from running import Command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(command: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks."""
    folder = tmp_path_factory.mktemp("matrix")
    return {num_ranks: launch(command, num_ranks, folder) for num_ranks in (1, 2, 3)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_everything_that_is_not_refused_ran(results, num_ranks):
    ran = {Combination(*result["combination"]) for result in results[num_ranks]}
    assert ran == {combination for combination in COMBINATIONS if combination.runs_on(num_ranks)}
    assert {c for c in COMBINATIONS if c.refusal is None} == {c for c in COMBINATIONS if c.runs_on(2)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_losses_norms_and_clipping_are_those_of_plain_torch(results, num_ranks):
    for result in results[num_ranks]:
        combination = Combination(*result["combination"])
        tolerance, expected = combination.tolerance, reference(combination)
        assert deviation(result) <= tolerance, combination
        assert result["norms"] == pytest.approx(expected.norms, rel=10 * tolerance), combination
        assert min(expected.norms) > CLIP, "the limit must bind, or clipping is not tested"
        # Adam's first moment after one step: (1 - beta1) times the clipped gradient.
        assert result["first_moment_norm"] == pytest.approx(0.1 * CLIP, rel=tolerance), combination


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gradient_that_is_infinite_on_one_rank_moves_nothing_on_any(results, num_ranks):
    """And the losses after it, which another test compares, are as if it had not been."""
    assert {str(r["combination"]): r["moved_by_infinity"] for r in results[num_ranks] if r["moved_by_infinity"]} == {}


def test_a_run_that_goes_back_to_an_earlier_state_repeats_itself_bit_for_bit(results):
    """As after a divergence: the same engine, on 2 ranks, is given the state of all ranks after step 3."""
    for result in results[2]:
        assert result["losses_again"] == result["losses"][SKIPPED_AFTER:], result["combination"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_fragments_of_all_ranks_are_the_whole_state_once(results, num_ranks):
    assert {str(r["combination"]): r["not_tiled"] for r in results[num_ranks] if r["not_tiled"]} == {}


def test_the_page_in_the_docs_is_what_ran(results):
    """But for the digits, which differ between machines."""
    written = page([result for of_ranks in results.values() for result in of_ranks])
    assert without_digits(PAGE.read_text(encoding="utf-8")) == without_digits(written), (
        f"run `python {matrix_program.__file__} --write`"
    )


def without_digits(text: str) -> str:
    return re.sub(r"yes, 1e-?\d+", "yes", text)
