"""Cost of a training step: all that is not the model, and the model against a plain torch loop.

    python benchmarks/step.py                                   # `small`, vocabulary 8000, fp32 and bf16
    python benchmarks/step.py --only budgets
    python benchmarks/step.py --only speed --preset base --vocabulary 37000 --max-tokens 8192 --precisions bf16

*Budgets*: data wait, padding, logging, checkpoints and memory of the loss in a real run of the command (budgets.py).

*Speed*: forward, backward and update of one rank, against a plain torch.nn.Transformer loop.

Both sides train networks of the same parameters on the same micro-batches with the same threads, in one process, taking
turns. Ours is the real engine under DeepSpeed for each ZeRO stage; the plain one is a careful loop in torch alone:
nn.Transformer, F.cross_entropy, torch.optim.Adam, autocast for bf16; once with nn.Transformer's own dropout and once
with dropout only where ours has it.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import budgets
import common
import torch
from common import Figures, Rounds, Stopwatch
from synthetic_corpus import PAD_ID, write_tokens
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.config.schema import ModelConfig, OptimizerConfig, TrainingConfig
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.distributed import group
from dist_transformer.distributed.group import Ranks
from dist_transformer.model.layers import SinusoidalPositions
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective

SEED = 1
LABEL_SMOOTHING = 0.1
LEARNING_RATE = 1e-4
BUDGET_RATIO = 1.3
PARTS = ("budgets", "speed")
PHASES = ("forward", "backward", "update")
PLAIN = "torch.nn.Transformer"
SAME_DROPOUT = "torch.nn.Transformer, our dropout"
"""Reference of all ratios: the same computation. By default nn.Transformer also drops attention weights and inner
activations of the feed-forward networks, unlike the paper."""


class Trainee(Protocol):
    """One side of the comparison."""

    def forward(self, batch: MicroBatch) -> Tensor:
        """Returns the label-smoothed loss, summed over the target tokens."""

    def backward(self, loss_sum: Tensor, target_tokens: int) -> None: ...

    def update(self) -> None: ...


class Ours:
    """The engine that trains in this package, alone in its group."""

    def __init__(self, config: ModelConfig, vocabulary: int, precision: str, stage: int, ranks: Ranks) -> None:
        torch.manual_seed(SEED)
        model = Transformer(config, vocabulary, vocabulary, PAD_ID).to(ranks.device)
        training = TrainingConfig(precision=precision, zero_stage=stage, label_smoothing=LABEL_SMOOTHING)
        objective = Objective(model, training.label_smoothing, training.precision)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self._engine = Engine(objective, training, OptimizerConfig(), ranks)
        self._engine.train()

    def forward(self, batch: MicroBatch) -> Tensor:
        loss_sum, _ = self._engine(batch.source_BS, batch.target_in_BT, batch.target_out_BT)
        return loss_sum

    def backward(self, loss_sum: Tensor, target_tokens: int) -> None:
        self._engine.backward(loss_sum, target_tokens)

    def update(self) -> None:
        self._engine.step(LEARNING_RATE)


class PlainTorch(nn.Module):
    """torch's own network of the same sizes, with the embedding shared and tied like ours by default."""

    def __init__(
        self, config: ModelConfig, vocabulary: int, precision: str, dropout: str, device: torch.device
    ) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self._autocast, self._scale = precision == "bf16", config.d_model**0.5
        self.embedding = nn.Embedding(vocabulary, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.positions = SinusoidalPositions(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.network = nn.Transformer(
            config.d_model,
            config.num_heads,
            config.num_encoder_layers,
            config.num_decoder_layers,
            config.d_ff,
            config.dropout,
            batch_first=True,
        )
        self.network.encoder.norm = self.network.decoder.norm = None  # the paper's post-norm stacks have no such norms
        if dropout == SAME_DROPOUT:
            _drop_as_the_paper_does(self.network)
        self.to(device)
        self.num_parameters = sum(p.numel() for p in self.parameters())
        self._optimizer = torch.optim.Adam(self.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), eps=1e-9)

    def forward(self, batch: MicroBatch) -> Tensor:
        with torch.autocast(batch.source_BS.device.type, torch.bfloat16, enabled=self._autocast):
            is_padding_BS = batch.source_BS == PAD_ID
            length = batch.target_in_BT.shape[1]
            hidden_BTD = self.network(
                self._embed(batch.source_BS),
                self._embed(batch.target_in_BT),
                tgt_mask=torch.ones(length, length, dtype=torch.bool, device=is_padding_BS.device).triu(1),
                tgt_is_causal=True,
                src_key_padding_mask=is_padding_BS,
                memory_key_padding_mask=is_padding_BS,
            )
            logits = F.linear(hidden_BTD, self.embedding.weight).flatten(0, 1)
        target = batch.target_out_BT.flatten()
        options = {"ignore_index": PAD_ID, "label_smoothing": LABEL_SMOOTHING}
        return F.cross_entropy(logits.float(), target, reduction="sum", **options)

    def backward(self, loss_sum: Tensor, target_tokens: int) -> None:
        (loss_sum / target_tokens).backward()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _embed(self, ids: Tensor) -> Tensor:
        scaled = self.embedding(ids) * self._scale
        return self.dropout(scaled + self.positions(0, ids.shape[1], scaled))


def _drop_as_the_paper_does(network: nn.Transformer) -> None:
    for layer in (*network.encoder.layers, *network.decoder.layers):
        layer.dropout = nn.Identity()  # that of the feed-forward network's inner activations
    for module in network.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def main() -> None:
    arguments = _arguments()
    found = common.begin(arguments.threads)
    figures: dict[str, Any] = {}
    if "budgets" in arguments.only:
        rows = budgets.measure(arguments)
        figures["budgets"] = {row.what: vars(row) for row in rows}
        print("\n" + budgets.description(arguments) + "\n\n" + budgets.table(rows), flush=True)
    if "speed" in arguments.only:
        figures |= _speed(arguments)
    common.finish(arguments, found, figures)


def _speed(arguments: argparse.Namespace) -> dict[str, Any]:
    ranks = group.join(600)
    config = ModelConfig(preset=arguments.preset)
    batches = batches_of(arguments, ranks.device)
    trainees = _trainees(arguments, config, ranks)
    sizes = {name: trainee.num_parameters for name, trainee in trainees.items()}
    assert len(set(sizes.values())) == 1, sizes
    print("\n" + _description(arguments, next(iter(sizes.values())), batches), flush=True)
    for trainee in trainees.values():
        timed_steps(trainee, batches[:1])  # allocates Adam's moments and chooses kernels
    cases: dict[str, Callable[[], Figures]] = {n: partial(timed_steps, t, batches) for n, t in trainees.items()}
    rounds = common.interleaved(cases, arguments.rounds)
    print("\n" + _table(rounds, arguments))
    group.leave()
    return {"parameters": sizes, "steps": rounds}


def timed_steps(trainee: Trainee, batches: Sequence[MicroBatch]) -> Figures:
    """Measures an optimizer step on each micro-batch. Seconds of the phases are wall seconds of all steps together."""
    figures = dict.fromkeys(PHASES, 0.0)
    tokens, total = 0, Stopwatch(with_descendants=False)
    for batch in batches:
        target_tokens = batch.shape.target_tokens
        tokens += target_tokens
        clock = Stopwatch(with_descendants=False)
        loss_sum = trainee.forward(batch)
        clock = _end(clock, figures, "forward", batch)
        trainee.backward(loss_sum, target_tokens)
        clock = _end(clock, figures, "backward", batch)
        trainee.update()
        _end(clock, figures, "update", batch)
    wall, cpu = total.read()
    figures |= {"wall_seconds": wall, "cpu_seconds": cpu}
    return figures | {"tokens_per_second": tokens / wall, "tokens_per_cpu_second": tokens / cpu}


def _end(clock: Stopwatch, figures: Figures, phase: str, batch: MicroBatch) -> Stopwatch:
    """Adds the time of a phase, in CPU-seconds if the CPU computes. Returns the clock of the next phase."""
    if batch.source_BS.is_cuda:
        torch.cuda.synchronize()
    wall, cpu = clock.read()
    figures[phase] += wall if batch.source_BS.is_cuda else cpu
    return Stopwatch(with_descendants=False)


def _trainees(arguments: argparse.Namespace, config: ModelConfig, ranks: Ranks) -> dict[str, Ours | PlainTorch]:
    trainees: dict[str, Ours | PlainTorch] = {}
    for precision in arguments.precisions:
        for plain in (PLAIN, SAME_DROPOUT):
            trainees[_name(plain, precision)] = PlainTorch(config, arguments.vocabulary, precision, plain, ranks.device)
        for stage in arguments.stages:
            ours = Ours(config, arguments.vocabulary, precision, stage, ranks)
            trainees[_name(f"ours, ZeRO {stage}", precision)] = ours
    return trainees


def _name(what: str, precision: str) -> str:
    return f"{what}, {precision}"


def batches_of(arguments: argparse.Namespace, device: torch.device) -> list[MicroBatch]:
    """Returns the first micro-batches of a shuffled epoch of the synthetic corpus."""
    rows_in_all = min(20_000, 40 * arguments.steps * max(1, arguments.max_tokens // 60))
    with tempfile.TemporaryDirectory() as name:
        corpus = write_tokens(Path(name), rows_in_all, arguments.vocabulary, 4096)
        data = corpus.run_data(lanes=1, max_tokens=arguments.max_tokens, window_rows=rows_in_all)
        loader = data.loader(data.start(), 0, 0, 1, 0)
        found = [loader.next_step().batches[0] for _ in range(arguments.steps)]
    return [_moved(batch, device) for batch in found if batch is not None]


def _moved(batch: MicroBatch, device: torch.device) -> MicroBatch:
    sides = [side.to(device) for side in (batch.source_BS, batch.target_in_BT, batch.target_out_BT)]
    return MicroBatch(batch.lane, batch.shape, *sides, batch.row_ids)


def _description(arguments: argparse.Namespace, num_parameters: int, batches: Sequence[MicroBatch]) -> str:
    real = sum(batch.shape.target_tokens for batch in batches) / len(batches)
    return (
        f"`{arguments.preset}`, {num_parameters / 1e6:.1f} M parameters, vocabulary {arguments.vocabulary:,}; 1 rank, "
        f"threads: {arguments.threads}; steps a round: {len(batches)}, each one micro-batch of at most "
        f"{arguments.max_tokens:,} tokens with {real:,.0f} real target tokens on average; medians of "
        f"rounds: {arguments.rounds}"
    )


def _table(rounds: Rounds, arguments: argparse.Namespace) -> str:
    budget = f"budget against Python peers: {BUDGET_RATIO}"
    header = ["network", "tokens/s", "tokens/CPU-s", *PHASES, "tokens/CPU-s to torch's, our dropout", "range", budget]
    rows = []
    for precision in arguments.precisions:
        plain = rounds[_name(SAME_DROPOUT, precision)]
        for name in [name for name in rounds if name.endswith(f", {precision}")]:
            samples = rounds[name]
            rates = [f"{common.median(samples, f'tokens_per_{clock}second'):,.0f}" for clock in ("", "cpu_")]
            shares = [f"{_share(samples, phase):.0%}" for phase in PHASES]
            ratio = common.median_ratio(samples, plain, "tokens_per_cpu_second")
            verdict = (
                ""
                if not name.startswith("ours") or precision != "fp32"
                else "above"
                if ratio >= BUDGET_RATIO
                else "below"
            )
            spread = common.ratio_range(samples, plain, "tokens_per_cpu_second")
            rows.append([name, *rates, *shares, f"{ratio:.2f}", spread, verdict])
    return common.markdown_table(header, rows)


def _share(samples: Sequence[Figures], phase: str) -> float:
    return common.median([{"share": s[phase] / sum(s[p] for p in PHASES)} for s in samples], "share")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=("tiny", "small", "base", "big"), default="small")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch: both sides, padding counted")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of each network in a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stages", type=int, nargs="+", choices=(0, 1, 2), default=[0, 1, 2])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--run-steps", type=int, default=60, help="of the real run; a log line each 10, a checkpoint each 20"
    )
    parser.add_argument("--run-pairs", type=int, default=60_000, help="of the real run's corpus")
    parser.add_argument("--loss-tokens", type=int, default=8192, help="target tokens for the memory of the loss")
    return common.arguments_of(parser, rounds=3)


if __name__ == "__main__":
    main()
