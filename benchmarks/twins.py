"""Twins: this program's training beside `torch.nn.Transformer` and Hugging Face's MarianMTModel, step by step.

    python benchmarks/twins.py                                # 200 steps: a minute
    python benchmarks/twins.py --plot twins.png --steps 400

The three have the same initial weights, the same batches of the demonstration corpus, the same dropout masks, and the
same learning rates (5.3). This program trains as it always does, by its loss and its DeepSpeed engine; the others by plain
torch: cross-entropy with label smoothing (5.4), torch's Adam, clipped gradients. A figure is the relative difference of a
step's loss per token from this program's.

Rounding differs, and what comes of it grows. Most of that is ReLU's: where an input lies within rounding of zero, one model has a
gradient there and the other none. So there are three cases: ReLU as in the paper; GELU, without such a place; and ReLU in fp64,
where this program's model, too, is trained by plain torch, and rounding is a billion times smaller.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import common
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.config.data_schema import CorpusConfig, DataConfig, TokenizerConfig
from dist_transformer.config.schema import Config, ModelConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.distributed import group
from dist_transformer.distributed.group import Ranks
from dist_transformer.interop.marian_weights import to_marian
from dist_transformer.model import cpu_kernels
from dist_transformer.model.layers import sinusoids
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective
from dist_transformer.training.engine.schedule import learning_rate

MODEL = ModelConfig(
    preset="tiny", d_model=32, d_ff=128, num_heads=4, num_encoder_layers=2, num_decoder_layers=2, dropout=0.1
)
VOCABULARY = 400
MICRO_BATCHES, ROWS = 2, 8
"""Micro-batches of a step, and pairs of each."""
LABEL_SMOOTHING, CLIP_NORM, WARMUP_STEPS = 0.1, 1.0, 400
LONGEST_TOKENS = 128
CASES = {
    "ReLU, fp32": ("relu", torch.float32),
    "GELU, fp32": ("gelu", torch.float32),
    "ReLU, fp64": ("relu", torch.float64),
}
OURS, TORCH, MARIAN = "this program", "torch.nn.Transformer", "Hugging Face's MarianMTModel"

MicroBatch = tuple[Tensor, Tensor, Tensor]
"""Source, target as the decoder reads it, target; (B, S) or (B, T)."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Takes source and decoder input; returns the logits (B, T, V)."""


class Masks:
    """Dropout whose masks depend on the step and on the number of the call alone: every model draws the same ones.

    `order_D`: the entries of the axis of d_model in the order of the model that draws.
    """

    def __init__(self, order_D: Tensor | None = None) -> None:
        self.order_D = order_D
        self.begin(0, 0)

    def begin(self, step: int, micro_batch: int) -> None:
        self.step, self.micro_batch, self.calls = step, micro_batch, 0

    def __call__(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        seed = (self.step * MICRO_BATCHES + self.micro_batch) * 1000 + self.calls
        self.calls += 1
        is_kept = torch.rand(input.shape, generator=torch.Generator().manual_seed(seed)) >= p
        if self.order_D is not None:
            is_kept = is_kept[..., self.order_D]
        return input * is_kept / (1 - p)


class TorchTwin(nn.Module):
    """The paper's model around torch's own layers, with one matrix for both embeddings and the output (3.4).

    torch.nn.Transformer also has norms after the last layers, and dropout of attention weights and within the feed-forward
    network, which the paper has not: its stacks are made without them.
    """

    def __init__(self, vocabulary: int, pad_id: int, activation: str) -> None:
        super().__init__()
        sizes = (MODEL.d_model, MODEL.num_heads, MODEL.d_ff, MODEL.dropout)
        encoder_layer = nn.TransformerEncoderLayer(*sizes, activation, batch_first=True)
        decoder_layer = nn.TransformerDecoderLayer(*sizes, activation, batch_first=True)
        self.core = nn.Transformer(
            MODEL.d_model,
            MODEL.num_heads,
            batch_first=True,
            custom_encoder=nn.TransformerEncoder(encoder_layer, MODEL.num_encoder_layers, enable_nested_tensor=False),
            custom_decoder=nn.TransformerDecoder(decoder_layer, MODEL.num_decoder_layers),
        )
        for layer in self.core.modules():
            if isinstance(layer, nn.MultiheadAttention):
                layer.dropout = 0.0
            elif isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                layer.dropout.p = 0.0
        self.embedding = nn.Embedding(vocabulary, MODEL.d_model)
        self.pad_id = pad_id

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        is_padding = source_BS == self.pad_id
        memory_BSD = self.core.encoder(self._embed(source_BS), src_key_padding_mask=is_padding)
        length = target_BT.shape[1]
        hidden_BTD = self.core.decoder(
            self._embed(target_BT),
            memory_BSD,
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            memory_key_padding_mask=is_padding,
        )
        return F.linear(hidden_BTD, self.embedding.weight)

    def _embed(self, token_BT: Tensor) -> Tensor:
        positions_TD = sinusoids(LONGEST_TOKENS, MODEL.d_model)[: token_BT.shape[1]].to(self.embedding.weight.dtype)
        return F.dropout(self.embedding(token_BT) * MODEL.d_model**0.5 + positions_TD, MODEL.dropout, self.training)

    def take(self, weights: dict[str, Tensor]) -> None:
        """Copies the weights of this program's model."""
        theirs = {"embedding.weight": weights["source_embedding.weight"]}
        names = {
            "self_attention.query_key_value.": "self_attn.in_proj_",
            "self_attention.output.": "self_attn.out_proj.",
            "self_attention_residual.norm.": "norm1.",
            "cross_attention.output.": "multihead_attn.out_proj.",
            "cross_attention_residual.norm.": "norm2.",
            "feed_forward.inner.": "linear1.",
            "feed_forward.outer.": "linear2.",
        }
        for stack, count, last in (("encoder", MODEL.num_encoder_layers, 2), ("decoder", MODEL.num_decoder_layers, 3)):
            for number in range(count):
                layer, ours = f"core.{stack}.layers.{number}.", f"{stack}_layers.{number}."
                all_names = {**names, "feed_forward_residual.norm.": f"norm{last}."}
                for kind in ("weight", "bias"):
                    for name, theirs_name in all_names.items():
                        if f"{ours}{name}{kind}" in weights:
                            theirs[f"{layer}{theirs_name}{kind}"] = weights[f"{ours}{name}{kind}"]
                    if stack == "decoder":
                        parts = [weights[f"{ours}cross_attention.{name}.{kind}"] for name in ("query", "key_value")]
                        theirs[f"{layer}multihead_attn.in_proj_{kind}"] = torch.cat(parts)
        self.load_state_dict(theirs)


def marian_twin(weights: dict[str, Tensor], tokenizer: Tokenizer, activation: str) -> nn.Module:
    """Returns the model of Hugging Face with this program's weights."""
    import transformers

    sizes = dict(
        d_model=MODEL.d_model, encoder_layers=MODEL.num_encoder_layers, decoder_layers=MODEL.num_decoder_layers
    )
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             (("attention_heads", MODEL.num_heads), ("ffn_dim", MODEL.d_ff))}  # fmt: skip
    config = transformers.MarianConfig(
        vocab_size=tokenizer.source_vocabulary,
        decoder_vocab_size=tokenizer.target_vocabulary,
        **sizes,
        **sides,
        activation_function=activation,
        dropout=MODEL.dropout,
        scale_embedding=True,
        max_position_embeddings=LONGEST_TOKENS,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.eos_id,
        decoder_start_token_id=tokenizer.bos_id,
    )
    model = transformers.MarianMTModel(config)
    tensors = to_marian(weights, MODEL, tokenizer.source_vocabulary, tokenizer.target_vocabulary)
    lacking = model.load_state_dict(tensors, strict=False)
    tied = ("embed_tokens.weight", "lm_head.weight", "embed_positions.weight")
    assert not lacking.unexpected_keys, lacking
    assert all(name.endswith(tied) for name in lacking.missing_keys), lacking
    return model


def batches_of(steps: int, folder: Path) -> tuple[Tokenizer, list[list[MicroBatch]]]:
    """Returns a sentencepiece model, trained here, and the micro-batches of each step, of pairs in their own order."""
    pairs = list(demo_pairs("train"))
    model = folder / "shared.model"
    sentences = (sentence for pair in pairs[:5000] for sentence in pair)
    train_tokenizer(sentences, TokenizerConfig(vocabulary_size=VOCABULARY), model)
    tokenizer = Tokenizer.load(model, model)
    count = ROWS * MICRO_BATCHES * steps
    pairs = [pairs[number % len(pairs)] for number in range(count)]
    sides = tokenizer.encode_source([s for s, _ in pairs], 1), tokenizer.encode_target([t for _, t in pairs], 1)
    rows = [(s[-LONGEST_TOKENS:], t[-LONGEST_TOKENS:]) for s, t in zip(*sides, strict=True)]
    micro_batches = [_micro_batch(rows[first : first + ROWS], tokenizer) for first in range(0, count, ROWS)]
    grouped = [micro_batches[first : first + MICRO_BATCHES] for first in range(0, len(micro_batches), MICRO_BATCHES)]
    return tokenizer, grouped


def _micro_batch(rows: list[tuple[list[int], list[int]]], tokenizer: Tokenizer) -> MicroBatch:
    source, target = (
        nn.utils.rnn.pad_sequence([torch.tensor(row[side]) for row in rows], True, tokenizer.pad_id) for side in (0, 1)
    )
    begin = torch.full((len(rows), 1), tokenizer.bos_id)
    return source, torch.cat([begin, target[:, :-1]], 1), target


def rates(steps: int) -> list[float]:
    """Returns the learning rates of 5.3, with a shorter warm-up."""
    data = DataConfig(train=CorpusConfig(demo="train"))
    config = Config(data=data, model=MODEL, schedule=ScheduleConfig(warmup_steps=WARMUP_STEPS))
    return [learning_rate(config, step) for step in range(1, steps + 1)]


def tokens_of(micro_batches: list[MicroBatch], pad_id: int) -> int:
    return sum(int((target != pad_id).sum()) for _, _, target in micro_batches)


@contextmanager
def drawn_by(masks: Masks) -> Iterator[None]:
    """Puts the masks in the place of this program's dropout and of torch's."""
    with patch.object(cpu_kernels, "dropout", masks), patch.object(F, "dropout", masks):
        yield


def our_losses(model: Transformer, steps: list[list[MicroBatch]], ranks: Ranks) -> list[float]:
    """Trains by this program's engine; returns the loss per token of each step."""
    settings = TrainingConfig(precision="fp32", zero_stage=1, gradient_clip_norm=CLIP_NORM)
    engine = Engine(Objective(model, LABEL_SMOOTHING, "fp32"), settings, OptimizerConfig(), ranks)
    masks, losses = Masks(), []
    try:
        with drawn_by(masks):
            for number, (micro_batches, rate) in enumerate(zip(steps, rates(len(steps)), strict=True)):
                tokens, total = tokens_of(micro_batches, model.pad_id), 0.0
                for place, micro_batch in enumerate(micro_batches):
                    masks.begin(number, place)
                    loss, _ = engine(*micro_batch)
                    engine.backward(loss, tokens)
                    total += float(loss.detach())
                assert engine.step(rate)
                losses.append(total / tokens)
    finally:
        engine.close()
    return losses


def their_losses(
    model: nn.Module, logits: Loss, steps: list[list[MicroBatch]], pad_id: int, masks: Masks
) -> list[float]:
    """Trains by plain torch; returns the loss per token of each step."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, betas=(0.9, 0.98), eps=1e-9)
    losses = []
    with drawn_by(masks):
        for number, (micro_batches, rate) in enumerate(zip(steps, rates(len(steps)), strict=True)):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            tokens, total = tokens_of(micro_batches, pad_id), 0.0
            for place, (source, target_in, target) in enumerate(micro_batches):
                masks.begin(number, place)
                of_tokens = logits(source, target_in).flatten(0, 1), target.flatten()
                smoothing = dict(ignore_index=pad_id, label_smoothing=LABEL_SMOOTHING, reduction="sum")
                loss = F.cross_entropy(*of_tokens, **smoothing) / tokens
                loss.backward()
                total += float(loss.detach())
            nn.utils.clip_grad_norm_(trained, CLIP_NORM)
            optimizer.step()
            losses.append(total)
    return losses


def losses_of(case: str, num_steps: int, ranks: Ranks) -> dict[str, list[float]]:
    """Returns the losses per token of each step by model. In fp64 all three are trained by plain torch."""
    activation, precision = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, steps = batches_of(num_steps, Path(folder))
    pad_id = tokenizer.pad_id
    torch.manual_seed(1)
    config = MODEL.model_copy(update={"activation": activation})
    ours = Transformer(config, tokenizer.source_vocabulary, tokenizer.target_vocabulary, pad_id)
    weights = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    of_torch = TorchTwin(tokenizer.source_vocabulary, pad_id, activation)
    of_torch.take(weights)
    of_marian = marian_twin(weights, tokenizer, activation)
    order_D = torch.cat([torch.arange(0, MODEL.d_model, 2), torch.arange(1, MODEL.d_model, 2)])

    def marian_logits(source_BS: Tensor, target_BT: Tensor) -> Tensor:
        is_real_BS = (source_BS != pad_id).long()
        logits: Tensor = of_marian(input_ids=source_BS, attention_mask=is_real_BS, decoder_input_ids=target_BT).logits
        return logits

    for each in (ours, of_torch, of_marian):
        each.to(precision)
    by_plain_torch = precision == torch.float64
    return {
        OURS: their_losses(ours, ours, steps, pad_id, Masks()) if by_plain_torch else our_losses(ours, steps, ranks),
        TORCH: their_losses(of_torch, of_torch, steps, pad_id, Masks()),
        MARIAN: their_losses(of_marian, marian_logits, steps, pad_id, Masks(order_D)),
    }


def differences(losses: dict[str, list[float]]) -> dict[str, list[float]]:
    """Returns the relative difference of each twin's loss from this program's at each step."""
    return {
        name: [abs(theirs / ours - 1) for theirs, ours in zip(losses[name], losses[OURS], strict=True)]
        for name in (TORCH, MARIAN)
    }


def table_of(losses: dict[str, dict[str, list[float]]]) -> str:
    """Returns the largest difference up to some steps as a Markdown table."""
    num_steps = len(next(iter(losses.values()))[OURS])
    ends = [end for end in (1, 10, 50, 100, 200, 500, 1000) if end < num_steps] + [num_steps]
    rows = [
        [f"{name}, {case}", *(f"{max(found[:end]):.1e}" for end in ends)]
        for case, each in losses.items()
        for name, found in differences(each).items()
    ]
    return common.markdown_table(["largest difference up to step", *map(str, ends)], rows)


def plot(losses: dict[str, dict[str, list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = range(1, len(next(iter(losses.values()))[OURS]) + 1)
    for (name, values), style in zip(next(iter(losses.values())).items(), ("-", "--", ":"), strict=True):
        above.plot(steps, values, style, label=name, linewidth=2)
    for case, each in losses.items():
        for name, values in differences(each).items():
            below.semilogy(steps, [max(value, 1e-17) for value in values], label=f"{name}, {case}", linewidth=1)
    above.set(ylabel=f"loss per token, {next(iter(losses))}")
    below.set(xlabel="step", ylabel="relative difference")
    above.legend(fontsize="small")
    below.legend(fontsize="small", loc="center left", bbox_to_anchor=(0.3, 0.3))
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--plot", type=Path, help="picture of the losses and differences, .png")
    arguments = common.arguments_of(parser, rounds=1)
    found = common.begin(threads=1)
    ranks = group.join(60)
    losses = {case: losses_of(case, arguments.steps, ranks) for case in arguments.cases}
    group.leave()
    first, last = next(iter(losses.values()))[OURS][0], next(iter(losses.values()))[OURS][-1]
    print(f"\n{table_of(losses)}\n\nLoss per token from {first:.3f} to {last:.3f} in {arguments.steps} steps.")
    if arguments.plot is not None:
        plot(losses, arguments.plot)
    common.finish(arguments, found, losses)


if __name__ == "__main__":
    main()
