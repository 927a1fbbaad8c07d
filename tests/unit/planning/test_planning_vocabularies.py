"""The vocabulary that parameters and memory are counted for: of the tokenizers where they are given."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.loading import load_config
from dist_transformer.config.model_size import count_by_part
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.tokenizer.tokenizer import train_tokenizer
from dist_transformer.errors import DataError
from dist_transformer.planning.memory import memory_of_rank
from dist_transformer.planning.step_time import micro_batch_flops
from dist_transformer.planning.vocabularies import with_counted_pieces


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with source.model of 120 pieces and target.model of 136."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for side, (name, size) in enumerate((("source", 120), ("target", 136))):
        train_tokenizer(_sentences(side), TokenizerConfig(vocabulary_size=size), folder / f"{name}.model")
    return folder


def _sentences(side: int) -> Iterator[str]:
    return (pair[side] for _, pair in zip(range(300), demo_pairs("train"), strict=False))


def written(folder: Path, tokenizers: Path, shared: bool) -> Path:
    target = "" if shared else f", target_model: {tokenizers}/target.model, shared: false"
    path = folder / "run.yaml"
    path.write_text(
        f"data: {{train: {{demo: train}}}}\ntokenizer: {{source_model: {tokenizers}/source.model{target}}}\n"
        f"model: {{preset: tiny, shared_embeddings: {str(shared).lower()}}}\ntraining: {{max_steps: 10000}}\n",
        encoding="utf-8",
    )
    return path


def said_by(*arguments: object) -> str:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False).stdout


@pytest.mark.parametrize(("shared", "sizes"), [(True, (120, 120)), (False, (120, 136))])
def test_check_and_plan_count_the_pieces_of_tokenizers_that_are_given(tmp_path, tokenizers, shared, sizes):
    path = written(tmp_path, tokenizers, shared)
    parameters = count_by_part(load_config(path).model, *sizes).total
    (of_check,) = re.findall(r"([\d,]+) parameters", said_by("config", "check", path))
    assert int(of_check.replace(",", "")) == parameters
    assert json.loads(said_by("plan", path, "--json"))["parameters"] == parameters


def test_the_output_is_planned_for_the_targets_pieces(tmp_path, tokenizers):
    config = load_config(written(tmp_path, tokenizers, shared=False))
    counted = with_counted_pieces(config)
    of_one_size = config.model_copy(update={"tokenizer": config.tokenizer.model_copy(update={"vocabulary_size": 136})})
    memories = [memory_of_rank(each, 1).parts["logits"] for each in (counted, of_one_size)]
    flops = [micro_batch_flops(each, 100, 100) for each in (counted, of_one_size)]
    assert (memories[0], flops[0]) == (memories[1], flops[1])


def test_of_a_file_that_is_gone_the_configured_size_counts_and_another_file_is_refused(tmp_path, tokenizers):
    config = load_config(written(tmp_path, tokenizers, shared=True))
    for name, expected in (("gone.model", None), ("run.yaml", DataError)):
        tokenizer = config.tokenizer.model_copy(update={"source_model": str(tmp_path / name)})
        changed = config.model_copy(update={"tokenizer": tokenizer})
        if expected is None:
            assert with_counted_pieces(changed) == changed
        else:
            with pytest.raises(expected, match=r"run\.yaml"):
                with_counted_pieces(changed)
