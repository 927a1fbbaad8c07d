"""Every option of the model under real DeepSpeed: the losses of plain torch, on one rank and on two, in stages 1 and 3."""

import json

import pytest
from running import records
from variants_program import CASES, MANY_PIECES, Case, launch, plain_losses

from dist_transformer.files import file_sha256

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Case, list[float]]]:
    """By number of ranks, by case."""
    folder = tmp_path_factory.mktemp("variants")
    return {num_ranks: launch(num_ranks, folder) for num_ranks in (1, 2)}


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


def test_a_checkpoint_from_before_these_options_is_gone_on_with(train_small):
    run = train_small("older", "training.max_steps=3", "schedule.warmup_steps=2")
    folder = run / "checkpoints" / "step_00000003"
    state, manifest = (json.loads((folder / name).read_text()) for name in ("state.json", "manifest.json"))
    younger = [f"model.{name}" for name in ("norm_type", "final_norm", "activation", "positions", "output_bias")]
    for name in younger:
        del state["recipe"][name]
    state["recipe"]["model.attention_gain"] = 1.0  # one day's checkpoints named it
    (folder / "state.json").write_text(json.dumps(state))
    size, digest = (folder / "state.json").stat().st_size, file_sha256(folder / "state.json")
    manifest["files"]["state.json"] |= {"bytes": size, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    train_small("older", "schedule.warmup_steps=2", "model.attention_gain=0.7071")
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5, 6]
