"""Forced decoding: probabilities of given translations, token by token, in one pass over all positions.

Axes: B pairs of one batch, S source, T target, both including the end of sentence; V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import inf

import torch
from torch import Tensor

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import CHARACTERS_A_TOKEN, Tokenizer
from dist_transformer.decoding.ensemble import log_probabilities
from dist_transformer.decoding.search import pad_together
from dist_transformer.decoding.translate import CHUNK_LINES, token_batches
from dist_transformer.errors import UserError
from dist_transformer.model.transformer import Transformer

BATCHES = DecodingConfig(beam_size=1)
CHUNK_TOKENS = 1024
"""Target tokens, padding counted, whose logits exist at once: 152 MB of fp32 for 37,000 pieces."""
Ids = list[int]


def score_pairs(
    models: Sequence[Transformer],
    tokenizer: Tokenizer,
    pairs: Iterable[tuple[str, str]],
    device: torch.device,
    max_tokens: int = BATCHES.max_source_tokens,
    files: str | None = "",
) -> Iterator[tuple[Ids, list[float]]]:
    """Yields for each pair (source, target), in order, the target's ids with eos, and the natural logarithm of the
    probability of each given the source and the ids before it, of several models the mean probability. `files` begins
    the message that refuses a pair that is too long; None: the pair gets minus infinity alone. Raises UserError: a
    sentence, on either side, has more than `max_tokens` tokens, or than a model has positions; the pairs before its
    chunk have been yielded."""
    remaining, num_before = iter(pairs), 0
    most = min([max_tokens, *(model.max_positions for model in models if model.max_positions is not None)])
    limit = f"at most {most} are scored at once (--max-source-tokens, decoding.max_source_tokens)"
    if most < max_tokens:
        limit = f"the model has only {most} positions (model.max_positions)"
    while chunk := list(islice(remaining, CHUNK_LINES)):
        texts = [(source.strip(), target.strip()) for source, target in chunk]
        at_least = [-(-max(map(len, pair)) // CHARACTERS_A_TOKEN) for pair in texts]
        characters = most * CHARACTERS_A_TOKEN  # what has more is too long, whatever its tokens
        sources = tokenizer.encode_source([source[:characters] for source, _ in texts])
        targets = tokenizer.encode_target([target[:characters] for _, target in texts])
        longer = [max(least, *map(len, pair)) for least, *pair in zip(at_least, sources, targets, strict=True)]
        too_long = [number for number, length in enumerate(longer) if length > most]
        if too_long and files is not None:
            line = f"{files}line {num_before + too_long[0] + 1}: {longer[too_long[0]]} tokens"
            raise UserError(
                f"{line}{' or more' if at_least[too_long[0]] > most else ''}, but {limit}: expected a shorter sentence on both "
                "sides; cut both, leave the pair out, or have it scored as the worst (--too-long lowest)"
            )
        for number in too_long:
            sources[number], targets[number], longer[number] = [tokenizer.eos_id], [tokenizer.eos_id], 1
        found: dict[int, list[float]] = {}
        for members in token_batches(longer, BATCHES):
            outputs = [targets[member] for member in members]
            source_BS = pad_together([sources[member] for member in members], tokenizer.pad_id).to(device)
            read_BT = pad_together([[tokenizer.bos_id, *ids[:-1]] for ids in outputs], tokenizer.pad_id).to(device)
            target_BT = pad_together(outputs, tokenizer.pad_id).to(device)
            rows = forced_log_probabilities(models, source_BS, read_BT, target_BT).tolist()
            found |= {member: row[: len(ids)] for member, row, ids in zip(members, rows, outputs, strict=True)}
        found |= {number: [-inf] for number in too_long}
        yield from ((target, found[index]) for index, target in enumerate(targets))
        num_before += len(chunk)


@torch.no_grad()
def forced_log_probabilities(
    models: Sequence[Transformer], source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor
) -> Tensor:
    """Natural logarithm of the probability of each token of `target_out_BT`; fp32 (B, T), 0 at padding.

    `target_in_BT` is the decoder's input: bos, then `target_out_BT` without its last token. The sum over a sentence is
    the `log_probability` of the same translation in a search. With several models the mean of their probabilities
    counts. All are in eval mode and on the device of the ids.
    """
    assert not any(model.training for model in models), "dropout would make the scores random: call eval() first"
    rows = max(1, CHUNK_TOKENS // target_in_BT.shape[1])
    chunks = zip(*(torch.split(ids, rows) for ids in (source_BS, target_in_BT, target_out_BT)), strict=True)
    return torch.cat([_chunk(models, *chunk) for chunk in chunks]).float()


def _chunk(models: Sequence[Transformer], source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor) -> Tensor:
    log_probability_BTV = log_probabilities([model(source_BS, target_in_BT) for model in models])
    chosen_BT = log_probability_BTV.gather(2, target_out_BT[..., None]).squeeze(2)
    return chosen_BT.masked_fill(target_out_BT == models[0].pad_id, 0.0)
