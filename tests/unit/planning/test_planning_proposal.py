"""Settings proposed for a corpus: sizes by its pairs, steps and vocabulary by its text, all of them a configuration."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.config.checks import cross_problems
from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import PRESETS, Config
from dist_transformer.planning.proposal import preset_for, proposed, rounded, steps_per_epoch, token_ratio
from dist_transformer.planning.step_time import FILLED_SHARE

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
CAPTIONS = {"tokens": 29_000 * 34, "long_tokens": 37, "characters": 102}


@pytest.mark.parametrize(
    ("pairs", "preset"),
    [(1, "tiny"), (29_000, "tiny"), (163_848, "small"), (4_500_000, "base"), (36_000_000, "big"), (10**10, "big")],
)
def test_the_size_of_the_model_follows_the_number_of_pairs(pairs: int, preset: str) -> None:
    assert preset_for(pairs) == preset


@pytest.mark.parametrize(
    ("preset", "name"), [("tiny", "multi30k_fast"), ("small", "tatoeba_fast"), ("base", "wmt14_en_de_base")]
)
def test_on_much_text_the_settings_are_those_of_the_recipe(preset: str, name: str) -> None:
    recipe = load_config(CONFIGS / f"{name}.yaml", check_files=False)
    ours = Config.model_validate(proposed(preset, 1e12, 37, 100))
    for section, key in (
        ("data", "lanes"), ("data", "max_tokens"), ("model", "preset"), ("model", "dropout"), ("model", "attention_gain"),
        ("model", "norm"), ("model", "positions"), ("optimizer", "matrices"), ("optimizer", "learning_rate"),
        ("schedule", "name"), ("schedule", "warmup_steps"), ("checkpoints", "average_last"),
    ):  # fmt: skip
        assert getattr(getattr(ours, section), key) == getattr(getattr(recipe, section), key), key
    assert ours.training.max_steps >= recipe.training.max_steps


def test_less_text_has_fewer_pieces_and_fewer_steps_of_which_a_quarter_at_most_is_warm_up() -> None:
    much, little = proposed("tiny", **CAPTIONS), proposed("tiny", **{**CAPTIONS, "tokens": CAPTIONS["tokens"] / 10})
    assert 5000 < much["tokenizer"]["vocabulary_size"] < 7000  # 6,000 in configs/multi30k.yaml
    assert little["tokenizer"]["vocabulary_size"] == rounded(CAPTIONS["tokens"] / 10 / 150)
    steps, pieces = little["training"]["max_steps"], little["tokenizer"]["vocabulary_size"]
    assert steps == rounded(35 * steps_per_epoch("tiny", CAPTIONS["tokens"] / 10 * token_ratio(pieces)))
    assert little["schedule"]["warmup_steps"] == steps // 4


@pytest.mark.parametrize(
    ("pieces", "counted"),  # of both sides with sentencepiece, in place of the estimated
    [
        (132, 2.57),
        (460, 1.63),
        (1800, 1.15),
        (190, 2.64),
        (930, 1.67),
        (3800, 1.21),
    ],  # Multi30k, then newstest 2008-2012
)
def test_few_pieces_cut_a_text_into_as_many_tokens_as_were_counted(pieces: int, counted: float) -> None:
    assert token_ratio(pieces) == pytest.approx(counted, rel=0.2)
    assert token_ratio(10 * pieces) >= 1


def test_long_pairs_and_epochs_are_those_of_the_proposed_vocabulary() -> None:
    few = proposed("tiny", 10_000, 40, 60)  # 280 captions
    assert few["tokenizer"]["vocabulary_size"] == 128
    assert few["data"]["filters"]["max_tokens"] >= 2 * 40 * token_ratio(128)
    steps = proposed("tiny", 300_000, 40, 60)["training"]["max_steps"]
    assert steps == pytest.approx(35 * 300_000 * token_ratio(2000) / (2 * 4096 * FILLED_SHARE), rel=0.05)


@pytest.mark.parametrize("steps", [1, 7, 500, 1250, 3500])
def test_the_checkpoints_whose_mean_becomes_the_model_are_of_the_last_fifth(steps: int) -> None:
    checkpoints = proposed("tiny", **CAPTIONS, max_steps=steps)["checkpoints"]
    averaged = checkpoints["average_last"]
    assert averaged == 1 or averaged * checkpoints["every_steps"] <= steps / 5
    assert averaged == {500: 4, 1250: 5, 3500: 5}.get(steps, 1)


def test_a_shorter_warm_up_has_a_lower_peak() -> None:
    ours = proposed("tiny", **CAPTIONS, max_steps=4 * 50)
    assert ours["schedule"]["warmup_steps"] == 50
    assert ours["optimizer"]["learning_rate"] == rounded(0.01 * 0.25**0.25)


def test_every_character_has_a_piece_unless_there_are_thousands() -> None:
    few, many = proposed("tiny", 1000, 20, 90), proposed("small", 1e7, 40, 5000)
    assert few["tokenizer"] == {"vocabulary_size": 188, "character_coverage": 1.0}
    assert many["tokenizer"] == {"vocabulary_size": 8000, "character_coverage": 0.9995}


@given(
    st.sampled_from([*PRESETS]), st.floats(1, 1e12), st.integers(1, 10_000), st.integers(1, 30_000),
    st.none() | st.integers(1, 10**6),
)  # fmt: skip
def test_every_proposal_is_a_configuration_without_a_problem(
    preset: str, tokens: float, long_tokens: int, characters: int, max_steps: int | None
) -> None:
    sections = proposed(preset, tokens, long_tokens, characters, max_steps)
    config = Config.model_validate({**sections, "data": {**sections["data"], "train": {"demo": "train"}}})
    assert cross_problems({name: getattr(config, name) for name in Config.model_fields}) == []
    assert config.training.max_steps == max_steps or max_steps is None
