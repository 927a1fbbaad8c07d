"""Lines of text to lines of text: cut into batches of sentences of like length, given back in the order they came.

Axes: B sentences of one batch, S source tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Protocol

import torch
from torch import Tensor

from dist_transformer.config.models import DecodingConfig
from dist_transformer.decoding.beam import beam_search
from dist_transformer.distributed import Ranks
from dist_transformer.errors import UserError
from dist_transformer.model.transformer import Transformer

CHUNK_LINES = 2048
"""Lines read, sorted by length and translated together: enough for full batches, little enough to stream."""


class TranslationTokenizer(Protocol):
    """What translation needs of a tokenizer."""

    @property
    def bos_id(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def pad_id(self) -> int: ...

    def encode_source(self, sentences: list[str], /) -> list[list[int]]:
        """Token ids of each sentence, eos included."""
        ...

    def decode_target(self, ids: list[int], /) -> str:
        """The sentence of target ids."""
        ...


def translate_lines(
    model: Transformer,
    tokenizer: TranslationTokenizer,
    lines: Iterable[str],
    config: DecodingConfig,
    device: torch.device,
) -> Iterator[str]:
    """One translation for each line, in order; a blank line gives an empty one. Reads `CHUNK_LINES` ahead.

    `model` is on `device` and in eval mode. Lines may have any length that the model has positions for; one above
    `config.max_tokens` goes alone.

    Raises:
        UserError: a line is longer than `model.max_positions`; those before its chunk have been given.
    """
    remaining, num_before = iter(lines), 0
    while chunk := list(islice(remaining, CHUNK_LINES)):
        translations = [""] * len(chunk)
        for batch in _batches(tokenizer, chunk, num_before, model.max_positions, config):
            for line, translation in _search(model, tokenizer, batch, config, device):
                translations[line - num_before] = translation
        yield from translations
        num_before += len(chunk)


def translate_together(
    model: Transformer,
    tokenizer: TranslationTokenizer,
    lines: Sequence[str],
    config: DecodingConfig,
    ranks: Ranks,
    progress: Callable[[], None],
) -> list[str]:
    """What `translate_lines` gives, on every rank: its batches are dealt out to the ranks (collective).

    The ranks meet at the end only. `progress` is called for each batch, whoever translates it. `lines` and the model's
    weights are the same on every rank.
    """
    found: dict[int, str] = {}
    chunks = (
        _batches(tokenizer, lines[first : first + CHUNK_LINES], first, model.max_positions, config)
        for first in range(0, len(lines), CHUNK_LINES)
    )
    for number, batch in enumerate(chain.from_iterable(chunks)):
        if number % ranks.num_ranks == ranks.rank:
            found.update(_search(model, tokenizer, batch, config, ranks.device))
        progress()
    everyones = {line: text for part in ranks.gather(found) for line, text in part.items()}
    return [everyones.get(line, "") for line in range(len(lines))]


Batch = list[tuple[int, list[int]]]
"""Lines translated at once: number from 0, source ids; longest first."""


def _batches(
    tokenizer: TranslationTokenizer,
    lines: Sequence[str],
    num_before: int,
    max_positions: int | None,
    config: DecodingConfig,
) -> Iterator[Batch]:
    encoded = tokenizer.encode_source([line.strip() for line in lines])
    _refuse_longer(max_positions, [len(ids) for ids in encoded], num_before)
    # Nothing but the end of sentence: a blank line, or characters that normalisation takes away.
    filled = [(num_before + index, ids) for index, ids in enumerate(encoded) if len(ids) > 1]
    for members in token_batches([len(ids) for _, ids in filled], config):
        yield [filled[member] for member in members]


def _search(
    model: Transformer, tokenizer: TranslationTokenizer, batch: Batch, config: DecodingConfig, device: torch.device
) -> Iterator[tuple[int, str]]:
    """The number and the translation of each line of a batch."""
    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    source_BS = pad_together([source for _, source in batch], tokenizer.pad_id).to(device)
    found = beam_search(model, source_BS, **ids, config=config)
    for (line, _), hypotheses in zip(batch, found, strict=True):
        yield line, tokenizer.decode_target(hypotheses[0].tokens)


def _refuse_longer(max_positions: int | None, lengths: Sequence[int], num_before: int) -> None:
    for number, length in enumerate(lengths, start=num_before + 1):
        if max_positions is not None and length > max_positions:
            raise UserError(
                f"line {number}: {length} tokens, but the model learned only {max_positions} positions "
                "(model.max_positions): cut the line into shorter sentences, or leave it empty"
            )


def token_batches(lengths: Sequence[int], config: DecodingConfig) -> Iterator[list[int]]:
    """Indices of `lengths`, longest first, in batches of at most `config.max_tokens` padded source tokens times beam.

    Longest first, so that a batch that does not fit in memory shows at once. What is too long alone goes alone.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batch[0]] if batch else 0
        if batch and (len(batch) + 1) * longest * config.beam_size > config.max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def pad_together(sentences: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """(B, S) int64 with padding at the end."""
    longest = max(len(ids) for ids in sentences)
    return torch.tensor([[*ids, *[pad_id] * (longest - len(ids))] for ids in sentences])
