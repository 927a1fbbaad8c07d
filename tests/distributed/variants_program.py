"""Trains each option of the model on real gloo ranks, one case after another; rank 0 writes losses and norms as JSON.

    variants_program.py RESULTS NUM_RANKS

Lanes are seeded as training seeds them, so that a sentence skips the same layers on whichever rank it is.
"""

import json
import os
import sys
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402
from plain_torch import TOLERANCE, VOCABULARY, MicroBatch, ragged_batches, tokens_of  # noqa: E402
from running import Command  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from dist_transformer.config.schema import ModelConfig, OptimizerConfig, TrainingConfig  # noqa: E402
from dist_transformer.model.transformer import Transformer  # noqa: E402
from dist_transformer.processes.launching import fork_local_ranks  # noqa: E402
from dist_transformer.training.train_state import dropout_seed  # noqa: E402

LANES, STEPS, LEARNING_RATE = 4, 4, 1e-2
SIZES: dict[str, Any] = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "deepnorm": dict(norm="deepnorm", positions="rotary", activation="swiglu", output_bias=True, layer_drop=0.3),
    "pre-norm": dict(norm="pre", positions="rotary", activation="gelu", norm_type="rms", layer_drop=0.3),
    "final norms": dict(final_norm=True, norm_type="rms", activation="silu", output_bias=True),
}
MANY_PIECES = 110_000
"""Stage 3 keeps parameters of up to 100,000 elements whole: this output bias is cut."""


@dataclass(frozen=True)
class Case:
    model: str
    stage: int
    precision: str = "fp32"
    vocabulary: int = VOCABULARY

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(**SIZES, **MODELS[self.model], dropout=0.0)

    @property
    def tolerance(self) -> float:
        """Of losses, relative."""
        return TOLERANCE[self.precision]


CASES = [
    *(Case(model, stage) for model in MODELS for stage in (1, 3)),
    Case("deepnorm", 1, "fp16"),
    Case("deepnorm", 3, "bf16"),
    Case("deepnorm", 3, vocabulary=MANY_PIECES),
]


def steps(case: Case) -> list[list[MicroBatch]]:
    """The lanes' micro-batches of each step; of many pieces, for time, fewer."""
    batches = ragged_batches(LANES * (STEPS // 2 if case.vocabulary == MANY_PIECES else STEPS))
    return [batches[start : start + LANES] for start in range(0, len(batches), LANES)]


def initial_model(case: Case) -> Transformer:
    torch.manual_seed(0)
    return Transformer(case.config, case.vocabulary, case.vocabulary, 0)


def plain_losses(case: Case) -> list[float]:
    """The same training by torch alone, in fp32: losses per token by step."""
    model, losses = initial_model(case), []
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), eps=1e-9)
    for number, micro_batches in enumerate(steps(case)):
        total = torch.zeros(())
        for lane, (source, target_in, target) in enumerate(micro_batches):
            torch.manual_seed(dropout_seed(1, number, lane))
            logits = model(source, target_in).flatten(0, 1)
            options = dict(ignore_index=0, label_smoothing=0.1, reduction="sum")
            total = total + F.cross_entropy(logits, target.flatten(), **options) / tokens_of(micro_batches)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    return losses


def launch(command: Command, num_ranks: int, folder: Path) -> dict[Case, list[float]]:
    """The losses of all cases on so many ranks."""
    results = folder / f"variants_{num_ranks}.json"
    code, said = command.program(Path(__file__), results, num_ranks)
    assert code == 0, f"variants_program.py on {num_ranks} ranks ended with {code}\n{said}"
    return {Case(*case): losses for case, losses in json.loads(results.read_text(encoding="utf-8"))}


def run_as_rank(path: Path) -> None:
    from dist_transformer.distributed import group

    ranks = group.join(120)
    results = [(astuple(case), _train(case, ranks)) for case in CASES]
    if ranks.is_rank_zero:
        path.write_text(json.dumps(results), encoding="utf-8")
    ranks.barrier()
    group.leave()
    os._exit(0)  # as `train` does: threads of gloo's may outlive the interpreter, and abort


def _train(case: Case, ranks: Any) -> list[float]:
    from dist_transformer.training.engine import engine as engine_module
    from dist_transformer.training.engine.engine import Engine
    from dist_transformer.training.engine.objective import Objective

    settings = TrainingConfig(zero_stage=case.stage, precision=case.precision)
    engine_module.INITIAL_LOSS_SCALE = 1024  # no update is skipped
    engine = Engine(Objective(initial_model(case), 0.1, case.precision), settings, OptimizerConfig(), ranks)
    losses = []
    for number, micro_batches in enumerate(steps(case)):
        tokens, total = tokens_of(micro_batches), torch.zeros(1, dtype=torch.float64)
        for lane in range(ranks.rank, LANES, ranks.num_ranks):
            torch.manual_seed(dropout_seed(1, number, lane))
            loss, _ = engine(*micro_batches[lane])
            engine.backward(loss, tokens)
            total += loss.detach().double()
        assert engine.step(LEARNING_RATE), case
        losses.append(float(ranks.all_reduce_sum(total)) / tokens)
    engine.close()
    return losses


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(fork_local_ranks(partial(run_as_rank, Path(sys.argv[1])), int(sys.argv[2])))
