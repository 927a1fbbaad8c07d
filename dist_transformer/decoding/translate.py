"""Translation of lines of text in batches of sentences of similar length, yielded in the original order.

A line that is too long is refused, or cut into parts that are translated like separate lines and joined.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import CHARACTERS_A_TOKEN, Tokenizer
from dist_transformer.decoding.long_lines import cut_line, join_parts
from dist_transformer.distributed.group import Ranks
from dist_transformer.distributed.rounds import WantsStop, failures_named, in_rounds
from dist_transformer.errors import DataError, UserError
from dist_transformer.model.search_interface import Searcher, SearchInput, check_prefix

CHUNK_LINES = 2048
"""Lines read, sorted by length and translated together: enough for full batches, few enough for streaming."""
NUMBERS_OF_A_PART = 2**40
"""Distance between the numbers of the parts of a line, so large that no line has the number of a part."""


@dataclass(frozen=True)
class Translation:
    """One translation of a line; if the line was cut, score and log-probability are the sums over its parts.

    Attributes:
        tokens: target ids without bos and eos.
        score: `log_probability` divided by the length penalty; the higher the better.
        log_probability: natural logarithm of the probability of the tokens and the eos after them.
    """

    text: str
    tokens: list[int]
    score: float
    log_probability: float


def translate_lines(
    searcher: Searcher,
    tokenizer: Tokenizer,
    lines: Iterable[str],
    config: DecodingConfig,
    prefixes: Iterable[str] | None = None,
    num_before: int = 0,
    progress: Callable[[int], None] = lambda lines: None,
) -> Iterator[list[Translation]]:
    """Yields each line's translations in order, best first; a blank line has an empty one. Reads CHUNK_LINES ahead.

    A batch has at most `config.max_tokens` source tokens times beam; a line above that forms its own batch. Raises
    UserError: a line is too long and `config.too_long` is "refuse", a prefix is too long, or there are more or fewer
    prefixes than lines; the lines before its chunk have been yielded.

    Args:
        prefixes: for each line, the beginning of its translations; empty: not prescribed.
        num_before: lines before the first of `lines` that are translated elsewhere. With sampling, the draws depend on
            the number of a line.
        progress: called after each batch of the search with the number of lines translated.
    """
    remaining = _with_prefixes(lines, prefixes)
    while chunk := list(islice(remaining, CHUNK_LINES)):
        parts = cut_lines(tokenizer, chunk, num_before, searcher.max_positions, config)
        found: dict[int, list[Translation]] = {}
        for members in token_batches([len(part.source) for part in parts], config):
            found.update(zip(members, _search(searcher, tokenizer, [parts[member] for member in members]), strict=True))
            progress(num_before + len(chunk) * len(found) // len(parts))
        of_lines: list[list[list[Translation]]] = [[] for _ in chunk]
        for index, part in enumerate(parts):
            of_lines[part.line - num_before].append(found[index])
        yield from map(_of_line, of_lines)
        num_before += len(chunk)


def translate_together(
    searcher: Searcher,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    config: DecodingConfig,
    ranks: Ranks,
    progress: Callable[[], None],
    wants_stop: WantsStop,
) -> list[str]:
    """The best translations of `translate_lines`, on every rank: its batches are shared among the ranks (collective).

    No rank waits for another in a search. `progress` is called after each round of one batch per rank. `lines` and the
    model's weights are the same on every rank. Raises Stopped, WorkFailed: on every rank, as from `in_rounds`.
    """
    batches: list[list[_Part]] = []
    for first in range(0, len(lines), CHUNK_LINES):
        chunk = [(line, "") for line in lines[first : first + CHUNK_LINES]]
        parts = cut_lines(tokenizer, chunk, first, searcher.max_positions, config)
        in_batches = token_batches([len(part.source) for part in parts], config)
        batches += [[parts[member] for member in members] for members in in_batches]
    found: dict[tuple[int, int], str] = {}

    def search(number: int) -> None:
        mine = number * ranks.num_ranks + ranks.rank
        if mine < len(batches):
            with failures_named(ranks):
                for part, (best, *_) in zip(batches[mine], _search(searcher, tokenizer, batches[mine]), strict=True):
                    found[part.line, part.number] = best.text
        progress()

    in_rounds(ranks, -(-len(batches) // ranks.num_ranks), search, wants_stop)
    everyones = {place: text for theirs in ranks.all_gather_object(found) for place, text in theirs.items()}
    texts: list[list[str]] = [[] for _ in lines]
    for line, part in sorted(everyones):
        texts[line].append(everyones[line, part])
    return [join_parts(of_line) for of_line in texts]


def first_batch(tokenizer: Tokenizer, lines: Sequence[str], config: DecodingConfig) -> list[str]:
    """The first batch of lines that `translate_together` translates: the longest ones."""
    chunk = list(lines[:CHUNK_LINES])
    lengths = [len(ids) for ids in tokenizer.encode_source(chunk)]
    return [chunk[index] for index in next(token_batches(lengths, config), [])]


def token_batches(lengths: Sequence[int], config: DecodingConfig) -> Iterator[list[int]]:
    """Yields indices of `lengths`, longest first, in batches of at most `config.max_tokens` padded source tokens times
    the hypotheses that each sentence has at once.

    Longest first, so that a batch that exceeds memory fails at once. A sentence above the limit forms its own batch.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batch[0]] if batch else 0
        if batch and (len(batch) + 1) * longest * config.rows_per_sentence > config.max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@dataclass(frozen=True)
class _Part:
    """A line or, if it is too long, a part of one."""

    line: int
    number: int
    source: list[int]
    prefix: list[int]


def _with_prefixes(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    if prefixes is None:
        yield from ((line, "") for line in lines)
        return
    for number, (line, prefix) in enumerate(zip_longest(lines, prefixes), start=1):
        if line is None or prefix is None:
            ended = "lines" if line is None else "prefixes"
            raise UserError(
                f"the {ended} end before number {number}: expected a prefix for each line, on a line of its own; an empty "
                "one leaves the translation free"
            )
        yield line, prefix


def cut_lines(
    tokenizer: Tokenizer,
    chunk: Sequence[tuple[str, str]],
    num_before: int,
    max_positions: int | None,
    config: DecodingConfig,
) -> list[_Part]:
    """Parts of the lines in order, without those of lines that have no token. DataError: one cannot be cut short enough."""
    texts, prefixes = [line.strip() for line, _ in chunk], [prefix for _, prefix in chunk]
    for line, pair in enumerate(chunk, start=num_before + 1):
        try:
            "".join(pair).encode()
        except UnicodeEncodeError:
            raise UserError(f"line {line}: not valid Unicode: half of a surrogate pair; mend the line") from None
    most = min(config.max_source_tokens, max_positions or config.max_source_tokens)
    characters = CHARACTERS_A_TOKEN * most
    encoded = tokenizer.encode_source([text[:characters] for text in texts])
    starts = tokenizer.encode_target(prefixes) if any(prefixes) else [[] for _ in chunk]
    parts = []
    for line, (text, source, start) in enumerate(zip(texts, encoded, starts, strict=True), start=num_before):
        fits = len(source) <= most and len(text) <= characters
        # Only the end of sentence: a blank line, or characters that normalisation removes.
        if len(source) < 2 and fits:
            continue
        check_prefix(max(len(start) - 1, 0), line, max_positions)  # a search would raise it too, but batch by batch
        cut = [source] if fits else _cut(tokenizer, line, text, len(source), most, config)
        # Without its end, a prefix can be continued; the later parts of a line have none.
        parts += [_Part(line, n, ids, start[:-1] if n == 0 else []) for n, ids in enumerate(cut)]
    return parts


def _cut(
    tokenizer: Tokenizer, line: int, text: str, num_tokens: int, most: int, config: DecodingConfig
) -> list[list[int]]:
    """Parts of a line that is too long; `num_tokens`: of its first CHARACTERS_A_TOKEN * most characters."""
    characters = CHARACTERS_A_TOKEN * most
    if config.too_long == "refuse":
        limit = "decoding.max_source_tokens" if most == config.max_source_tokens else "model.max_positions"
        size = num_tokens if len(text) <= characters else f"{len(text):,} characters, over {num_tokens}"
        raise UserError(
            f"line {line + 1}: {size} tokens, but at most {most} are translated at once ({limit}): cut the line into "
            "shorter sentences, leave it empty, or have it cut with --too-long split"
        )

    def num_tokens_of(part: str) -> int:
        return most + 1 if len(part) > characters else len(tokenizer.encode_source([part])[0])

    try:
        cut = cut_line(text, num_tokens_of, most)
    except UserError as error:
        raise DataError(f"line {line + 1}: {error}") from None
    return [ids for ids in tokenizer.encode_source(cut) if len(ids) > 1]


def _search(searcher: Searcher, tokenizer: Tokenizer, batch: Sequence[_Part]) -> Iterator[list[Translation]]:
    """Yields the translations of each part, the best first."""
    inputs = [SearchInput(each.source, each.prefix, each.line + NUMBERS_OF_A_PART * each.number) for each in batch]
    for hypotheses in searcher.search(inputs):
        yield [
            # A vocabulary of bytes can produce a line break.
            Translation(tokenizer.decode_target(h.tokens).replace("\n", " "), h.tokens, h.score, h.log_probability)
            for h in hypotheses
        ]


def _of_line(parts: Sequence[list[Translation]]) -> list[Translation]:
    """Translations of a line from those of its parts: the best ones joined, the second best ones ..."""
    if not parts:
        return [Translation("", [], 0.0, 0.0)]
    return parts[0] if len(parts) == 1 else [_joined(together) for together in zip(*parts, strict=False)]


def _joined(parts: tuple[Translation, ...]) -> Translation:
    return Translation(
        join_parts([part.text for part in parts]),
        [token for part in parts for token in part.tokens],
        sum(part.score for part in parts),
        sum(part.log_probability for part in parts),
    )
