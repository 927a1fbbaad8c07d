"""Learn to reverse: trained from text by the command, in under a minute, every answer is right."""

import random
from pathlib import Path

import pytest
from running import Command

from dist_transformer.cli.evaluate import evaluate_command
from dist_transformer.files import read_json

pytestmark = pytest.mark.slow

LETTERS = "abcdefghij"
LONGEST = 6
TRAINING_ROWS, TEST_ROWS = 20_000, 200
RUN = """
run: {name: reverse}
data:
  train: {source: train.source, target: train.reversed}
  validation: {source: test.source, target: test.reversed}
  test: {source: test.source, target: test.reversed}
  lanes: 1
  max_tokens: 1536
  loader_workers: 0
tokenizer: {type: unigram, vocabulary_size: 32}  # a piece for each letter
model: {d_model: 64, d_ff: 128, num_heads: 4, num_encoder_layers: 2, num_decoder_layers: 2, dropout: 0.0}
optimizer: {learning_rate: 0.003}
schedule: {name: linear, warmup_steps: 100}
training: {max_steps: 800, precision: fp32, zero_stage: 0, gradient_clip_norm: 1.0}
validation: {every_steps: 800, translate: false}
checkpoints: {every_steps: 25, keep_last: 5, average_last: 5}
tracking: {enabled: false}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train and test: what is given, and what is to be answered; no row of test is in train."""
    folder, drawn = tmp_path_factory.mktemp("learn"), random.Random(1)
    different: set[tuple[str, ...]] = set()
    while len(different) < TRAINING_ROWS + TEST_ROWS:
        different.add(tuple(drawn.choices(LETTERS, k=drawn.randint(1, LONGEST))))
    rows = sorted(different)
    drawn.shuffle(rows)  # short rows are drawn first, as there are few of them
    for split, part in (("test", rows[:TEST_ROWS]), ("train", rows[TEST_ROWS:])):
        for side, step in (("source", 1), ("reversed", -1)):
            lines = (" ".join(row[::step]) for row in part)
            (folder / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def test_a_small_model_learns_to_reverse_perfectly(folder, quick_client):
    (folder / "reverse.yaml").write_text(RUN, encoding="utf-8")
    Command(folder, quick_client)("train", "reverse.yaml")
    run = folder / "runs" / "reverse"
    evaluate_command(run)
    scores = read_json(run / "evaluation" / "test.json")
    assert scores["pairs"] == TEST_ROWS
    assert scores["exact_match"] == 1
    expected = (folder / "test.reversed").read_text(encoding="utf-8")
    assert (run / "evaluation" / "test.translations").read_text(encoding="utf-8") == expected
