"""The only adapter of sentencepiece: trains a model on sentences, and converts text to token ids and back.

Ids of a trained model: padding 0, begin of sentence 1, end of sentence 2, unknown 3. Sizes of vocabularies are rounded
up to multiples of 8, which matrix kernels need; ids beyond the last piece are never produced and decode to nothing.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sentencepiece

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.errors import DataError
from dist_transformer.files import MISPLACED, patiently, replacing

Result = TypeVar("Result")

PAD_ID, BOS_ID, EOS_ID, UNKNOWN_ID = 0, 1, 2, 3
VOCABULARY_MULTIPLE = 8
TRAINING_SENTENCES = 2_000_000
"""Most sentences (both sides) that a model is trained on."""
TRAINING_THREADS = 4
"""Number of threads, independent of the machine's cores: unigram training sums in an order that depends on it."""
CHARACTERS_A_TOKEN = 64
"""A text with more characters than this for each token allowed counts as too long and is not tokenized, which would take
100 bytes of memory a character: a line of 100 MB took 11 GB. The pieces of a trained model have at most 16 characters."""
LONGEST_BYTES, PART = 4192, re.compile(r"(?s).{1,512}(?!\S)|.{512}")
"""Longest sentence that sentencepiece learns from, and a part of one that is cut: TRAINING_SENTENCES parts have less than
2^30 characters, the most that unigram training takes."""
NO_MODEL = (
    "not a complete sentencepiece model, expected a .model file as spm_train writes it: copy it again. Word lists, .vocab files "
    "and codes of subword-nmt are not read: leave tokenizer.source_model and target_model out, and one is trained"
)
SAMPLING_SEED = 1
ERRORS_ONLY = 2
"""Value of sentencepiece's `minloglevel`: its progress lines do not belong on the user's screen."""


def train_tokenizer(
    sentences: Iterator[str], settings: TokenizerConfig, out: Path, whole_pieces: Sequence[str] = ()
) -> None:
    """Trains a model on `sentences` and writes it to `out` completely or not at all; equal input gives equal files.

    `whole_pieces` become one piece each, at any place of a text; they are part of the vocabulary's size.
    Raises DataError if the text has too few different pieces, or too many characters, for the vocabulary; exceptions of
    `sentences` pass through, and OSErrors of the disk.
    """
    size = round_up(settings.vocabulary_size)
    errors: list[BaseException] = []

    def guarded() -> Iterator[str]:
        try:
            yield from sentences
        except BaseException as error:  # sentencepiece turns it into a RuntimeError with a text
            errors.append(error)
            raise

    sentencepiece.set_random_generator_seed(SAMPLING_SEED)
    with replacing(out) as temporary, temporary.open("wb") as writer:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=guarded(),
                model_writer=writer,
                model_type=settings.type,
                vocab_size=size,
                hard_vocab_limit=settings.type == "bpe",
                character_coverage=settings.character_coverage,
                normalization_rule_name=settings.normalization,
                byte_fallback=False,
                input_sentence_size=TRAINING_SENTENCES,
                shuffle_input_sentence=True,
                pad_id=PAD_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                unk_id=UNKNOWN_ID,
                user_defined_symbols=list(dict.fromkeys(whole_pieces)),
                num_threads=TRAINING_THREADS,
                minloglevel=ERRORS_ONLY,
            )
        except (RuntimeError, SystemError) as error:  # an OSError is of `writer`, and no fault of the text
            raise [*errors, _training_error(str(error), settings.type, size)][0] from None


def training_parts(text: str, max_tokens: int) -> list[str]:
    """Returns what a tokenizer learns from a sentence: a long one is cut between words, one that is always dropped left out."""
    if len(text.encode("utf-8", "surrogatepass")) <= LONGEST_BYTES:
        return [text]
    return PART.findall(text) if len(text) <= CHARACTERS_A_TOKEN * max_tokens else []


def with_sampling_seed(seed: int, tokenize: Callable[[], Result]) -> Result:
    """Returns the result of `tokenize`; random draws in it depend only on the seed and the sentences, in any process.

    sentencepiece has a generator for each thread, which takes the seed when the thread draws its first number and never
    again; so each seed gets a thread of its own. (From 0.2.2 on a number of the process is mixed into the seed.)
    """
    sentencepiece.set_random_generator_seed(seed)
    with ThreadPoolExecutor(max_workers=1) as fresh_thread:
        return fresh_thread.submit(tokenize).result()


class Tokenizer:
    """The two models of a run. Sentences end with `eos_id`; `pad_id`, `bos_id`, `eos_id` are the same on both sides.

    But a source model may name padding as its end (`source_end`): those sources end with nothing that counts.
    """

    def __init__(self, source: sentencepiece.SentencePieceProcessor, target: sentencepiece.SentencePieceProcessor):
        self._source, self._target = source, target
        self.bos_id: int = source.bos_id()
        self.eos_id: int = target.eos_id()
        self.source_end: int = source.eos_id()
        pieces = max(source.get_piece_size(), target.get_piece_size())
        taken = source.pad_id() if source.pad_id() == target.pad_id() else -1
        self.pad_id: int = taken if taken >= 0 else pieces
        self.source_vocabulary = round_up(max(source.get_piece_size(), self.pad_id + 1))
        self.target_vocabulary = round_up(max(target.get_piece_size(), self.pad_id + 1))

    @staticmethod
    def load(source_model: Path, target_model: Path | None = None) -> "Tokenizer":
        """Loads the models; one shared model if the target's is not given, or the same. DataError if a file cannot be used."""
        source = _load_model(source_model)
        target = source if target_model in (None, source_model) else _load_model(target_model)
        for name in ("bos_id", "eos_id"):
            ours, theirs = getattr(source, name)(), getattr(target, name)()
            is_padding = name == "eos_id" and ours == source.pad_id() == target.pad_id()
            if ours != theirs and not is_padding:
                raise DataError(
                    f"{source_model} has {name} {ours}, but {target_model} has {theirs}: "
                    f"both models must use the same ids. Train both with the same --{name}."
                )
        return Tokenizer(source, target)

    @property
    def special(self) -> SpecialTokens:
        """Ids of the tokens that are no text, and the number of the target's pieces."""
        return SpecialTokens(self.bos_id, self.eos_id, self.pad_id, self._target.get_piece_size())

    def encode_source(self, sentences: Sequence[str], num_threads: int = 1, sampling: float = 0.0) -> list[list[int]]:
        """Converts sentences to token ids, each ending with `source_end`; `eos_id` alone, if there is no text.

        `sampling`: share of merges left out (bpe) or alpha (unigram), drawn in one thread; see `with_sampling_seed`.
        """
        encoded = _encode(self._source, sentences, num_threads, sampling)
        return [ids if len(ids) > 1 else [self.eos_id] for ids in encoded]

    def encode_target(self, sentences: Sequence[str], num_threads: int = 1, sampling: float = 0.0) -> list[list[int]]:
        """Converts target sentences to token ids, as `encode_source`."""
        return _encode(self._target, sentences, num_threads, sampling)

    def decode_target(self, ids: Sequence[int]) -> str:
        """Converts target ids to a sentence; skips padding, begin, end and ids beyond the last piece."""
        return _decode(self._target, ids, self.pad_id)

    def decode_source(self, ids: Sequence[int]) -> str:
        """Converts source ids to a sentence, as `decode_target`."""
        return _decode(self._source, ids, self.pad_id)

    def source_pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the piece of each source id; "" for those beyond the last piece."""
        return _pieces(self._source, ids)

    def target_pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the piece of each target id; "" for those beyond the last piece."""
        return _pieces(self._target, ids)

    def source_spans(self, sentence: str) -> list[tuple[int, int]]:
        """Returns begin and end of the text of each id of `sentence`, in characters; the end of sentence is last."""
        return [*_spans(self._source.encode(sentence, out_type="immutable_proto").pieces), (len(sentence),) * 2]

    def target_spans(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Returns begin and end of the text of each id in `decode_target(ids)`; spans of skipped ids are empty."""
        left_out = _left_out(self._target, self.pad_id)
        pieces = self._target.decode([index for index in ids if not left_out(index)], out_type="immutable_proto").pieces
        spans, found = iter(_spans(pieces)), [(0, 0)]
        for index in ids:
            found.append((found[-1][1],) * 2 if left_out(index) else next(spans))
        return found[1:]

    def num_unknown(self, source: list[list[int]], target: list[list[int]]) -> tuple[int, int]:
        """Returns the numbers of source and target ids that stand for text without a piece."""
        ids = self._source.unk_id(), self._target.unk_id()
        return sum(each.count(ids[0]) for each in source), sum(each.count(ids[1]) for each in target)

    def can_spell_source(self, sentence: str) -> bool:
        """True if no part of a source sentence is unknown."""
        return self._source.unk_id() not in self._source.encode(sentence)

    def first_difference(self) -> tuple[int, str, str] | None:
        """Returns the first id whose pieces differ between the sides, and both pieces; None for a shared vocabulary."""
        ids = range(max(self._source.get_piece_size(), self._target.get_piece_size()))
        pieces = zip(ids, self.source_pieces(ids), self.target_pieces(ids), strict=True)
        return next(((index, ours, theirs) for index, ours, theirs in pieces if ours != theirs), None)


def round_up(size: int) -> int:
    """Rounds up to a multiple of 8."""
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _encode(
    model: sentencepiece.SentencePieceProcessor, sentences: Sequence[str], num_threads: int, sampling: float
) -> list[list[int]]:
    if sampling:
        # One by one: a list is encoded in a separate thread, whose generator would start from the seed again.
        return [
            model.encode(text, out_type=int, add_eos=True, enable_sampling=True, alpha=sampling, nbest_size=-1)
            for text in sentences
        ]
    encoded: list[list[int]] = model.encode(list(sentences), out_type=int, add_eos=True, num_threads=num_threads)
    return encoded


def _decode(model: sentencepiece.SentencePieceProcessor, ids: Sequence[int], pad_id: int) -> str:
    left_out = _left_out(model, pad_id)
    text: str = model.decode([int(index) for index in ids if not left_out(index)])
    return text


def _left_out(model: sentencepiece.SentencePieceProcessor, pad_id: int) -> Callable[[int], bool]:
    """Returns a test that is True for an id without text."""
    special, pieces = {pad_id, model.bos_id(), model.eos_id()}, model.get_piece_size()
    return lambda index: index in special or index >= pieces


def _pieces(model: sentencepiece.SentencePieceProcessor, ids: Sequence[int]) -> list[str]:
    size = model.get_piece_size()
    return [model.id_to_piece(int(index)) if index < size else "" for index in ids]


def _spans(pieces: Iterable[Any]) -> list[tuple[int, int]]:
    return [(int(piece.begin), int(piece.end)) for piece in pieces]


def _load_model(path: Path) -> sentencepiece.SentencePieceProcessor:
    if not path.is_file():
        raise DataError(f"{path}: no such file, expected a sentencepiece model (.model).")
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.load_from_serialized_proto(patiently(path, path.read_bytes, MISPLACED))
    except RuntimeError as error:
        raise DataError(f"{path}: {NO_MODEL}") from error
    if model.get_piece_size() == 0:
        raise DataError(f"{path}: {NO_MODEL}")
    for name in ("bos", "eos"):
        if getattr(model, f"{name}_id")() < 0:
            raise DataError(f"{path}: the model has no {name} piece. Train it with --{name}_id set to an id from 0 on.")
    return model


def _training_error(message: str, kind: str, size: int) -> DataError:
    if possible := re.search(r"value <= (\d+)", message):
        most = int(possible.group(1)) // VOCABULARY_MULTIPLE * VOCABULARY_MULTIPLE
        return DataError(
            f"tokenizer.vocabulary_size: {size} pieces cannot be made of the training corpus, at most "
            f"{possible.group(1)} can. Set tokenizer.vocabulary_size to {most} or less, or use more text."
        )
    if required := re.search(r"required_chars. (\d+) vs (\d+)", message):
        return DataError(
            f"tokenizer.vocabulary_size: {size} pieces are fewer than the {required.group(2)} that the characters of "
            f"the training corpus need. Set a larger vocabulary_size or a tokenizer.character_coverage from 0.98 on."
        )
    if "sentences_.empty()" in message:
        message = "all its sentences are empty, or longer than data.filters.max_tokens allows. Look at the text."
    return DataError(f"sentencepiece cannot train a {kind} model of {size} pieces on the training corpus: {message}")
