"""Every option of the model under real DeepSpeed: the losses of plain torch, on one rank and on two, in stages 1 and 3."""

import pytest
from running import Command
from variants_program import CASES, MANY_PIECES, Case, launch, plain_losses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def losses(command: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Case, list[float]]]:
    """By number of ranks, by case."""
    folder = tmp_path_factory.mktemp("variants")
    return {num_ranks: launch(command, num_ranks, folder) for num_ranks in (1, 2)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_option_of_the_model_trains_as_in_plain_torch_on_any_ranks(losses, case):
    """Skipped layers among them: which ones is drawn by lane, and each rank has every gradient."""
    expected = plain_losses(case)
    for num_ranks in (1, 2):
        assert losses[num_ranks][case] == pytest.approx(expected, rel=case.tolerance), num_ranks


def test_an_output_bias_that_stage_3_cuts_is_among_the_cases():
    assert any(
        case.vocabulary == MANY_PIECES > 100_000 and case.stage == 3 and case.config.output_bias for case in CASES
    )
