"""`training.same_bits` on real ranks: every layout computes the same bits, and a resume may change the layout."""

import hashlib
import json
import math
from pathlib import Path

import pytest

from dist_transformer.training.checkpoint.tensor_files import StateFiles
from dist_transformer.training.engine.optimizer import PARTS

pytestmark = pytest.mark.slow

LAYOUTS = [(ranks, stage) for stage in (1, 2, 0) for ranks in (3, 2, 4)]
"""Ranks and ZeRO stage. One rank is of stage 0, whatever is asked for."""
SETTINGS = (
    "training.same_bits=true",
    "training.gradient_clip_norm=0.5",  # between the norms of these steps: some are clipped
    "training.ema_decay=0.9",
    "schedule.warmup_steps=2",
    "model.output_bias=true",
    "model.norm=pre",
    "tokenizer.vocabulary_size=201",  # no multiple of any CPU's vectors
    f"training.max_steps={2 * len(LAYOUTS)}",
    "checkpoints.every_steps=2",
    "checkpoints.keep_last=20",
)


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of weights, moments and moving average in each checkpoint, whatever files they lie in."""
    return {path.name: _digest(StateFiles(path)) for path in sorted((run / "checkpoints").glob("step_????????"))}


def _digest(files: StateFiles) -> str:
    found = hashlib.sha256()
    for name, shape in sorted(files.shapes.items()):
        for part in PARTS:
            values = files.read(part, name, 0, math.prod(shape))
            assert values is not None, (part, name)
            found.update(f"{part}/{name}".encode() + values.numpy().tobytes())
    return found.hexdigest()


def norms(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["gradient_norm"] for record in map(json.loads, lines) if record["event"] == "train"]


@pytest.fixture(scope="module")
def alone(train_small) -> Path:
    """The steps on one rank in one go."""
    return train_small("alone", *SETTINGS)


def test_a_run_that_changes_its_ranks_and_stage_every_two_steps_has_the_bits_of_one_rank_in_every_checkpoint(
    train_small, alone
):
    for number, (ranks, stage) in enumerate(LAYOUTS, 1):
        settings = (*SETTINGS, f"training.zero_stage={stage}", f"training.max_steps={2 * number}")
        chained = train_small("chained", *settings, ranks=ranks)
        name = f"step_{2 * number:08d}"
        assert digests(chained)[name] == digests(alone)[name], f"ZeRO {stage} on {ranks} ranks"
    assert norms(chained) == norms(alone)
    assert min(norms(alone)) < 0.5 < max(norms(alone))
    model = "model/model.safetensors"
    assert (chained / model).read_bytes() == (alone / model).read_bytes()


def test_without_it_two_ranks_have_other_bits_than_one(train_small, alone):
    other = train_small("plain", *SETTINGS, "training.same_bits=false", "training.max_steps=4", ranks=2)
    assert digests(other)["step_00000004"] != digests(alone)["step_00000004"]


def test_a_resume_with_other_threads_is_told_of(train_small, alone):
    train_small("threads", *SETTINGS, "training.max_steps=4", OMP_NUM_THREADS="1")
    run = train_small("threads", *SETTINGS, "training.max_steps=5", OMP_NUM_THREADS="2")
    said = (run / "train.log").read_text(encoding="utf-8")
    assert "step_00000004 was computed with 1 threads a rank, this start has 2, which rounds otherwise" in said
