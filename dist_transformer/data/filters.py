"""Rules by which pairs are dropped or repaired. A pair is counted once, by the first rule that it breaks, as RULES says."""

import html
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from itertools import compress
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dist_transformer.config.data_schema import CorpusConfig, DataConfig, FilterConfig
from dist_transformer.data import sentences
from dist_transformer.data.languages import detector
from dist_transformer.data.sentences import Keys, Mask, Sentences, comparable, contained, pair_keys
from dist_transformer.data.sources.corpus import RawBatch
from dist_transformer.data.sources.retries import reason_of
from dist_transformer.data.tokenizer.tokenizer import CHARACTERS_A_TOKEN
from dist_transformer.errors import DataError
from dist_transformer.files import patiently, replacing
from dist_transformer.plugins import KeepPair, Plugin, call, find

log = logging.getLogger(__name__)

_OF_SENTENCES = (
    "bad_encoding empty markup identical too_long letters digits punctuation repeated numbers language lingua"
)
_OF_CORPORA = "scores held_out plugin duplicates near_duplicates length_ratio"
RULES = tuple(f"{_OF_SENTENCES} {_OF_CORPORA}".split())
REPETITION_RULES = ("duplicates", "near_duplicates")
"""Rules that compare a pair with all others (prepare/duplicates.py)."""
LENGTH_RULES = ("too_long", "length_ratio")
"""Rules that need the tokens."""
RATIO_FREE_TOKENS = 10
"""Length of the longer side below which pairs pass the length ratio: `Yes.` may have a long translation."""
HELD_OUT_NAME = "held_out.npz"
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_TAG = re.compile(
    r"""</?([A-Za-z][\w:-]*)(?:\s+[\w:-]+(?: ?= ?(?:"[^"<]*"|'[^'<]*'|[^\s"'<>]+))?)*\s*/?>|<!--.{0,500}?-->"""
)
_INLINE = {"a", "b", "i", "u", "em", "strong", "span", "font", "sub", "sup", "small", "big", "tt", "code", "g", "x"}
"""Tags that stand within words; others separate them."""
_LONE = _INLINE - {"g", "x"} | {"br", "p", "hr", "h1", "h2", "h3", "h4", "div", "li", "ul", "tr", "td", "img"}
"""Tags also where they neither have attributes nor are closed; other names may be words: <laughs>."""
_APART = r"[.,'\u2019\u00a0\u202f \u2007-\u200a\u066b\u066c\uff0c\uff0e\u00b7_]"
_NUMBER = re.compile(rf"(?<!\d)(?:\d{{1,3}}(?:{_APART}\d{{3}})+|\d{{1,2}}(?:,\d\d)+,\d{{3}})(?!\d)|\d+")
"""A number, also with its thousands apart, or in India's way: 1,00,000."""
_FORMER_TAG = re.compile(r"</?([A-Za-z][A-Za-z0-9]*)\b[^<>]{0,500}>|<!--.{0,500}?-->")
_FORMER_NUMBER = re.compile(r"(?<!\d)\d{1,3}(?:[.,'\u2019\u00a0\u202f ]\d{3})+(?!\d)|\d+")


class HeldOut(NamedTuple):
    """Sorted keys of the sentences that a training corpus may not have on its sides; in older files of each side its own."""

    source: Keys
    target: Keys

    @staticmethod
    def load(folder: Path, is_needed: bool = False) -> "HeldOut | None":
        """Reads what `save` wrote; None if it is not there, DataError if it cannot be read, or is needed."""
        path = folder / HELD_OUT_NAME
        try:
            arrays = np.load(BytesIO(patiently(path, path.read_bytes)))
            return HeldOut(arrays["source"], arrays["target"])
        except (OSError, ValueError, EOFError, LookupError, BadZipFile) as error:
            if isinstance(error, FileNotFoundError) and not is_needed:
                return None
            raise DataError(
                f"{path}: cannot be read ({reason_of(error)}), but without it sentences of the validation and test corpora "
                f"would be trained on. Put it back, or delete {folder} and prepare again."
            ) from error

    def save(self, folder: Path) -> None:
        with replacing(folder / HELD_OUT_NAME) as temporary, temporary.open("wb") as file:
            np.savez(file, source=self.source, target=self.target)


@dataclass(frozen=True)
class KeptText:
    """The pairs of a batch that no rule drops, their markup repaired, with the tags of the corpus.

    Attributes:
        positions: positions of the kept pairs in the batch.
        dropped: positions of the dropped pairs by rule.
        repaired: number of pairs whose markup was repaired.
        keys: keys of the kept pairs, without tags.
        signatures: of the kept pairs (see Sentences), only where near_duplicates needs them.
    """

    positions: NDArray[np.int64]
    source: list[str]
    target: list[str]
    dropped: dict[str, list[int]]
    repaired: int
    keys: Keys
    signatures: NDArray[np.uint8]

    @staticmethod
    def all_of(source: Sequence[str | None], target: Sequence[str | None]) -> "KeptText":
        """Returns pairs that are all kept, without keys."""
        texts, count = [[text or "" for text in side] for side in (source, target)], len(source)
        keys, signatures = np.zeros(count, np.uint64), np.empty((count, 0), np.uint8)
        return KeptText(np.arange(count), texts[0], texts[1], {}, 0, keys, signatures)

    def counts(self) -> Counter[str]:
        """Returns the number of dropped pairs by rule."""
        return Counter({rule: len(positions) for rule, positions in self.dropped.items()})

    def without(self, broken: Mapping[str, Mask]) -> "KeptText":
        """Returns the pairs that break none of further rules, given a mask of the kept pairs for each, in their order."""
        kept, dropped = np.ones(len(self.positions), np.bool_), dict(self.dropped)
        for rule, mask in broken.items():
            if found := self.positions[kept & mask].tolist():
                dropped[rule] = [*dropped.get(rule, ()), *found]
            kept &= ~mask
        source, target = list(compress(self.source, kept)), list(compress(self.target, kept))
        positions, keys, signatures = self.positions[kept], self.keys[kept], self.signatures[kept]
        return KeptText(positions, source, target, dropped, self.repaired, keys, signatures)


@dataclass(frozen=True)
class Cleaner:
    """The rules of a corpus that need no tokens. Can be sent to another process.

    Attributes:
        languages: codes of the source and the target language.
        is_former: keys, tags and numbers are as corpora prepared in an older format (recipe.py) have them.
    """

    settings: FilterConfig
    languages: tuple[str, str]
    held_out: HeldOut | None = None
    is_former: bool = False

    @staticmethod
    def of(split: str, data: DataConfig, folder: Path, holds_out: bool = False, is_former: bool = False) -> "Cleaner":
        """Returns the rules of a split of the prepared corpus in `folder`; `holds_out`: it must have sentences held out."""
        corpus = data.training_corpora().get(split, CorpusConfig())
        filters = data.filters_of(corpus)
        settings = filters.without_rules() if split == "validation" else filters
        held_out = HeldOut.load(folder, holds_out and "held_out" in settings.thresholds())
        return Cleaner(settings, data.languages_of(corpus), held_out, is_former)

    def repetition_rules(self) -> dict[str, float]:
        """Returns the thresholds of those REPETITION_RULES that are on."""
        return {rule: value for rule, value in self.settings.thresholds().items() if rule in REPETITION_RULES}

    def clean(self, batch: RawBatch, repeated: Mapping[str, NDArray[np.int64]] | None = None) -> KeptText:
        """Returns the pairs of a batch that break no rule; `repeated`: numbers of the rows that repeat others, by rule."""
        text = self._by_pair(batch)
        bare = [source.removeprefix(batch.prefix) for source in text.source]
        if bare:
            text, broken = self._by_text(text, bare, batch)
            if self.settings.plugin is not None:
                broken["plugin"] = ~np.logical_or.reduce([*broken.values(), np.zeros(len(bare), np.bool_)])
                pairs = [*compress(zip(bare, text.target, strict=True), broken["plugin"])]
                plugin, keep = _plugin(self.settings.plugin)
                kept = call(plugin, lambda: [keep(*pair) for pair in pairs])
                if any(isinstance(each, str | float) for each in kept):  # a run that has begun so must stay as it is
                    _warn_of_values(plugin)
                broken["plugin"][broken["plugin"]] = call(plugin, lambda: [not each for each in kept])
            for rule, rows in (repeated or {}).items():
                broken[rule] = np.isin(text.positions + batch.first_row, rows)
            text = text.without({rule: broken[rule] for rule in RULES if rule in broken})
        return text

    def _by_pair(self, batch: RawBatch) -> KeptText:
        """Applies the rules that look at single pairs, and repairs their markup."""
        settings, most = self.settings, CHARACTERS_A_TOKEN * self.settings.max_tokens
        most_markup = settings.thresholds().get("markup")
        text, broken, repaired = KeptText.all_of(batch.source, batch.target), list[str](), 0
        for position, (tagged, target) in enumerate(zip(text.source, text.target, strict=True)):
            source, rule = tagged.removeprefix(batch.prefix), ""
            if position in batch.bad_encoding:
                rule = "bad_encoding"
            elif not (source.strip() and target.strip()):
                rule = "empty"
            elif most_markup is not None and not {"<", "&"}.isdisjoint(source + target):
                plain = without_markup(source, self.is_former), without_markup(target, self.is_former)
                shares = (1 - len(new) / len(old) for old, new in zip((source, target), plain, strict=True))
                rule = "markup" if max(shares) > most_markup or not all(plain) else ""
                repaired += not rule and plain != (source, target)
                source, target = plain
                text.source[position], text.target[position] = batch.prefix + source, target
            if not rule and settings.drop_identical and source.strip() == target.strip():
                rule = "identical"
            elif not rule and max(len(batch.prefix) + len(source), len(target)) > most:
                rule = "too_long"
            broken.append(rule)
        rules = np.array(broken)
        return replace(text, repaired=repaired).without({rule: rules == rule for rule in RULES if rule in {*broken}})

    def _by_text(self, text: KeptText, bare: list[str], batch: RawBatch) -> tuple[KeptText, dict[str, Mask]]:
        """Returns the pairs with their keys, and masks of those that break rules that look at many of them at once."""
        on, sides = self.settings.thresholds(), (Sentences(bare), Sentences(text.target))
        both = (bare, text.target)
        forms = [each if self.is_former else [*map(comparable, each)] for each in both]
        keyed = [side if form == each else Sentences(form) for side, form, each in zip(sides, forms, both, strict=True)]
        of_one_side: dict[str, Callable[[Sentences], Mask]] = {
            "letters": lambda side: side.share(sentences.LETTER) < on["letters"],
            "digits": lambda side: side.share(sentences.DIGIT) > on["digits"],
            "punctuation": lambda side: side.share(sentences.PUNCTUATION, sentences.SYMBOL) > on["punctuation"],
            "repeated": lambda side: side.repeats(int(on["repeated"])),
            "numbers": lambda side: side.number(sentences.DIGIT) >= int(on["numbers"]),
        }
        broken = {rule: is_bad(sides[0]) | is_bad(sides[1]) for rule, is_bad in of_one_side.items() if rule in on}
        if "numbers" in on:  # so far of all pairs that have one
            least, mask = int(on["numbers"]), broken["numbers"]
            form = _FORMER_NUMBER if self.is_former else _NUMBER
            pairs = compress(zip(bare, text.target, strict=True), mask)
            mask[mask] = [_numbers(source, least, form) != _numbers(target, least, form) for source, target in pairs]
        languages = self.languages, self.languages[::-1]  # of each side: its own, then the other
        for rule in ("language", "lingua"):
            if rule in on:
                broken[rule] = np.zeros(len(bare), np.bool_)
                for side, texts, (own, other) in zip(sides, (bare, text.target), languages, strict=True):
                    long = side.number(sentences.LETTER) >= on[rule]
                    is_other = detector(rule, own, other)([*compress(texts, long)])
                    broken[rule][long] |= np.array(is_other, np.bool_)
        if self.settings.scores:
            fair = [batch.scores[name][text.positions] >= least for name, least in self.settings.scores.items()]
            broken["scores"] = ~np.logical_and.reduce(fair)
        if "held_out" in on and self.held_out is not None:
            found = zip(keyed, self.held_out, strict=True)
            masks = [(side.num_kept >= on["held_out"]) & contained(side.keys, keys) for side, keys in found]
            broken["held_out"] = masks[0] | masks[1]
        signatures = text.signatures
        if "near_duplicates" in on:
            signatures = np.minimum(keyed[0].signatures(0), keyed[1].signatures(1)).astype(np.uint8)
        return replace(text, keys=pair_keys(*keyed), signatures=signatures), broken


def without_markup(text: str, is_former: bool = False) -> str:
    """Returns a sentence with its HTML entities decoded, also those encoded twice, and without tags."""
    plain = text if is_former else _without_tags(text, _TAG, _LONE)
    for _ in range(2):
        plain = _ENTITY.sub(lambda found: html.unescape(found[0]), plain)
    plain = _without_tags(plain, _FORMER_TAG if is_former else _TAG, {"br"})
    return text if plain == text else " ".join(plain.split())


def _without_tags(text: str, form: re.Pattern[str], lone: set[str]) -> str:
    """Removes tags; mere names in angle brackets are one if the first is closed, or alone and among `lone`, else words."""
    closed = {tag[1].lower() for tag in form.finditer(text) if tag[0].startswith("</")}

    def instead(tag: re.Match[str]) -> str:
        name = (tag[1] or "").lower()
        is_tag = form is not _TAG or not name or name in closed or "=" in tag[0] or "/" in tag[0]
        is_word = not is_tag and not (name in lone and tag[0] == f"<{tag[1]}>")
        return tag[0] if is_word else "" if name in _INLINE else " "

    return form.sub(instead, text)


def _numbers(text: str, least: int, form: re.Pattern[str]) -> set[str]:
    """Returns the numbers of a sentence with so many digits, without separators and leading zeros, in ASCII digits."""
    found = ("".join(str(unicodedata.decimal(c)) for c in number if c.isdecimal()) for number in form.findall(text))
    return {number for digits in found if len(number := digits.lstrip("0")) >= least}


@cache
def _plugin(given: str) -> tuple[Plugin, KeepPair]:
    plugin = find("data.filters.plugin", given)
    return plugin, plugin.load()


@cache
def _warn_of_values(plugin: Plugin) -> None:
    told = "filters    %s of %s returns text or scores, which count as true unless they are empty or 0: expected True or False"
    log.warning(told, plugin.name, plugin.file)


def filter_lengths(source_tokens: ArrayLike, target_tokens: ArrayLike, settings: FilterConfig) -> dict[str, Mask]:
    """Returns a mask of the pairs that break each rule by their lengths in tokens (end of sentence included).

    A side of one token is only the end of sentence: the tokenizer's normalization has removed its characters.
    """
    source, target = np.asarray(source_tokens, dtype=np.int64), np.asarray(target_tokens, dtype=np.int64)
    longer, shorter = np.maximum(source, target), np.minimum(source, target)
    return {
        "empty": shorter < 2,
        "too_long": longer > settings.max_tokens,
        "length_ratio": (longer >= RATIO_FREE_TOKENS) & (longer > settings.max_length_ratio * shorter),
    }
