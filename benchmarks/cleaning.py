"""Rules that clean text: pairs a second, and precision and recall on noise of known truth in real text.

    python benchmarks/cleaning.py                                             # in the embedded corpus
    python benchmarks/cleaning.py --source train.en.gz --target train.de.gz --pairs 40000

Each rule is alone on the text and on noise of its kind, a tenth of the pairs: sides in the wrong language, shifted pairs,
duplicates and near-duplicates, markup, leaked test sentences, and so on. Pairs of the text itself that a rule drops are
mistakes, but for real repetitions, which are recognised by a comparison of their own. Repaired markup counts as found
if the text is the original one. Shifted pairs are found by `scores` of an IBM Model 1 that the script fits (each half of
the corpus scored by the model of the other half). Speed: seconds of CPU in `Cleaner.clean`, without reading the text.
"""

import argparse
import html
import random
import re
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import common
import numpy as np

from dist_transformer.config.data_schema import RULE_THRESHOLDS, CorpusConfig, DataConfig, FilterConfig
from dist_transformer.config.schema import Config
from dist_transformer.data.filters import Cleaner
from dist_transformer.data.prepare.chunks import BATCH_ROWS
from dist_transformer.data.prepare.clean import clean
from dist_transformer.data.sources.corpus import RawBatch, read_pairs

Pair = tuple[str, str]
TEST_PAIRS, NOISE_SHARE, LETTERS = 1000, 0.1, 30
SLOW = ("lingua",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="text, line by line; default: the embedded corpus")
    parser.add_argument("--target", type=Path, help="its translation")
    parser.add_argument("--pairs", type=int, default=20_000)
    arguments = common.arguments_of(parser, rounds=3)
    found = common.begin(1)
    corpus = CorpusConfig(demo="train")
    if arguments.source is not None:
        corpus = CorpusConfig(source=str(arguments.source.absolute()), target=str(arguments.target.absolute()))
    pairs = list(zip(*read_pairs(corpus, DataConfig()), strict=True))
    random.Random(1).shuffle(pairs)
    test, text = pairs[:TEST_PAIRS], pairs[TEST_PAIRS : TEST_PAIRS + arguments.pairs]
    known = [measured(rule, make, text, test) for rule, make in NOISE.items()]
    rows = [[*each[:3], *(f"{value:.1%}" for value in each[3:])] for each in known]
    print(common.markdown_table(("rule", "noise", "dropped from the text", "precision", "recall"), rows), "\n")
    speeds = {name: [speed(rules, text) for _ in range(arguments.rounds)] for name, rules in SPEEDS.items()}
    fast = [[name, f"{np.median(values):,.0f}"] for name, values in speeds.items()]
    print(common.markdown_table(("rules", "pairs a second of CPU"), fast), "\n")
    common.finish(arguments, found, {"rules": known, "pairs_per_second": speeds, "pairs": len(text)})


# ------------------------------------------------------------------------------------------------------------- noise


def long_enough(pair: Pair) -> bool:
    return all(sum(map(str.isalpha, side)) >= LETTERS for side in pair)


def wrong_language(pairs: list[Pair], draw: random.Random) -> list[Pair]:
    """A side that is not translated, or sides that are exchanged."""
    made: list[Callable[[Pair], Pair]] = [lambda p: (p[0], p[0]), lambda p: (p[1], p[1]), lambda p: (p[1], p[0])]
    return [draw.choice(made)(pair) for pair in pairs if long_enough(pair)]


def shifted(pairs: list[Pair], draw: random.Random) -> list[Pair]:
    return [(source, pairs[number - 1][1]) for number, (source, _) in enumerate(pairs)]


def dressed(pair: Pair, draw: random.Random) -> Pair:
    """The same letters and digits in another case, with other punctuation."""
    change = draw.choice([str.upper, str.lower, lambda text: f" {text.rstrip('.!?')} !", lambda text: f'"{text}"'])
    return change(pair[0]), change(pair[1])


def with_typo(pair: Pair, draw: random.Random) -> Pair:
    sides = list(pair)
    side = draw.randrange(2)
    place = draw.choice([place for place, each in enumerate(sides[side]) if each.isalpha()])
    sides[side] = sides[side][:place] + draw.choice(["", "q", "xj"]) + sides[side][place + 1 :]
    return sides[0], sides[1]


def with_markup(pair: Pair, draw: random.Random) -> Pair:
    """Markup that leaves the same text when it is gone."""

    def dress(text: str) -> str:
        words = html.escape(" ".join(text.split())).split(" ")
        words[draw.randrange(len(words))] += draw.choice(["&nbsp;", "<br/>", "</b>", "<!-- x -->"])
        return "<b>" + " ".join(words)

    return dress(pair[0]), dress(pair[1])


def of_symbols(kinds: str) -> Callable[[Pair, random.Random], Pair]:
    def make(pair: Pair, draw: random.Random) -> Pair:
        return tuple(" ".join("".join(draw.choices(kinds, k=draw.randint(2, 6))) for _ in range(5)) for _ in pair)  # type: ignore[return-value]

    return make


def repeating(pair: Pair, draw: random.Random) -> Pair:
    word = draw.choice([each for each in pair[1].split() if not any(map(str.isdigit, each))] or ["ja"])
    return pair[0], f"{pair[1]} " + f"{word[:12]} " * draw.randint(8, 20)


def with_numbers(pair: Pair, draw: random.Random, other: bool) -> Pair:
    first, second = draw.sample(range(100, 100_000), 2)
    return f"{pair[0]} ({first:,})", f"{pair[1]} ({second if other else first})"


def each_of(change: Callable[[Pair, random.Random], Pair]) -> Callable[[list[Pair], random.Random], list[Pair]]:
    return lambda pairs, draw: [change(pair, draw) for pair in pairs]


NOISE: dict[str, Callable[[list[Pair], random.Random], list[Pair]]] = {
    "language": wrong_language,
    "lingua": wrong_language,
    "scores": shifted,
    "duplicates": each_of(dressed),
    "near_duplicates": lambda pairs, draw: [with_typo(pair, draw) for pair in pairs if long_enough(pair)],
    "held_out": each_of(dressed),
    "markup": each_of(with_markup),
    "letters": each_of(of_symbols("0123456789+-*/|%")),
    "digits": each_of(of_symbols("0123456789")),
    "punctuation": each_of(of_symbols(".,;!?-|/")),
    "repeated": each_of(repeating),
    "numbers": each_of(lambda pair, draw: with_numbers(pair, draw, other=True)),
}


# ----------------------------------------------------------------------------------------------- precision and recall


def measured(rule: str, make: Callable[..., list[Pair]], text: list[Pair], test: list[Pair]) -> list[Any]:
    """Rule, number of noisy pairs, dropped pairs of the text, precision, recall."""
    draw = random.Random(2)
    clean_text = [with_numbers(p, draw, other=False) for p in text] if rule == "numbers" else text
    origin = test if rule == "held_out" else clean_text[: int(len(text) * NOISE_SHARE)]
    noise = make(origin, draw)
    rows = [*clean_text, *noise]
    is_noise = np.arange(len(rows)) >= len(clean_text)
    changed = dropped(rule, rows, test)
    if rule == "markup":  # repaired to another text is a mistake on either side
        wanted = [*clean_text, *origin]
        changed = np.array([after != before for after, before in zip(changed, rows, strict=True)])
        right = np.array(
            [a is None or plain(a) == plain(b) for a, b in zip(dropped(rule, rows, test), wanted, strict=True)]
        )
        hits, mistakes = changed & is_noise & right, changed & ~(is_noise & right)
    else:
        hits, mistakes = changed & is_noise, changed & ~is_noise
    real = repetitions(rule, rows, test, np.flatnonzero(mistakes))
    good = int(hits.sum()) + real
    return [
        rule,
        str(len(noise)),
        f"{mistakes.sum()} ({real} real)",
        good / max(1, int(changed.sum())),
        hits.sum() / len(noise),
    ]


def plain(pair: Pair) -> Pair:
    return " ".join(html.unescape(pair[0]).split()), " ".join(html.unescape(pair[1]).split())


def dropped(rule: str, rows: list[Pair], test: list[Pair]) -> Any:
    """A mask of the dropped rows; for markup the text that is left of each, None if it is dropped."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, pairs in (("train", rows), ("test", test)):
            for side, language in enumerate(("en", "de")):
                lines = "".join(pair[side].replace("\n", " ") + "\n" for pair in pairs)
                (folder / f"{file}.{language}").write_text(lines, encoding="utf-8")
        filters: dict[str, Any] = {"rules": {"held_out": rule == "held_out"}, "max_tokens": 10_000}
        if rule == "scores":
            scores = model_1_scores(rows)
            (folder / "scores.txt").write_text("".join(f"{score:.6f}\n" for score in scores))
            filters["scores"] = {"scores.txt": 0.0}
        else:
            filters["rules"][rule] = True
        corpora = {file: {"source": f"{file}.en", "target": f"{file}.de"} for file in ("train", "test")}
        config = Config.model_validate({"data": {**corpora, "root": name, "filters": filters}})
        clean(config, folder / "out", lambda *_: None)
        lines = (folder / "out" / "train.dropped.tsv").read_text(encoding="utf-8").split("\n")[:-1]
        found = [int(line.split("\t")[1]) - 1 for line in lines]
        assert {line.split("\t")[0] for line in lines} <= {rule, "empty"}
        if rule != "markup":
            return np.isin(np.arange(len(rows)), found)
        sides = [
            (folder / "out" / f"train.{each}").read_text(encoding="utf-8").split("\n")[:-1] for each in ("en", "de")
        ]
        kept = iter(zip(*sides, strict=True))
        gone = {*found}
        return [None if row in gone else next(kept) for row in range(len(rows))]


def repetitions(rule: str, rows: list[Pair], test: list[Pair], mistakes: np.ndarray) -> int:
    """The number of these rows that do repeat an earlier one, or a test sentence, by a comparison of their own."""

    def words(text: str) -> str:
        return " ".join(re.findall(r"\w+", text.casefold()))

    if rule == "held_out":
        sides = [{words(pair[side]) for pair in test} for side in (0, 1)]
        return sum(any(words(rows[row][side]) in sides[side] for side in (0, 1)) for row in mistakes)
    if rule == "duplicates":
        seen = [tuple(map(words, pair)) for pair in rows[: int(max(mistakes, default=-1)) + 1]]
        return sum(seen[row] in {*seen[:row]} for row in mistakes)
    if rule != "near_duplicates":
        return 0

    def grams(pair: Pair) -> set[Any]:
        return {(side, words(pair[side])[n : n + 4]) for side in (0, 1) for n in range(len(words(pair[side])) - 3)}

    least, sets = RULE_THRESHOLDS[rule] - 0.1, [grams(pair) for pair in rows[: int(max(mistakes, default=-1)) + 1]]

    def similar(row: int) -> bool:
        own = sets[row]
        return any(len(own & each) >= least * len(own | each) for each in sets[:row])

    return sum(map(similar, mistakes.tolist()))


def model_1_scores(rows: list[Pair]) -> np.ndarray:
    """A score of each pair: how much likelier its target words are with this source than without it (nats a word)."""
    sides = [[re.findall(r"\w+", pair[side].lower()) for pair in rows] for side in (0, 1)]
    ids: list[dict[str, int]] = [{}, {}]
    numbers = [
        [np.array([ids[n].setdefault(w, len(ids[n])) for w in words], int) for words in sides[n]] for n in (0, 1)
    ]
    scores = np.zeros(len(rows))
    order = np.random.default_rng(3).permutation(len(rows))
    for fit, score in ((order[::2], order[1::2]), (order[1::2], order[::2])):
        width = len(ids[1])
        cells = np.concatenate([(numbers[0][r][:, None] * width + numbers[1][r]).ravel() for r in fit])
        places = np.concatenate([np.tile(np.arange(len(numbers[1][r])), len(numbers[0][r])) for r in fit])
        sizes = [len(numbers[1][r]) for r in fit]
        begins = np.repeat(np.cumsum(sizes) - sizes, [len(numbers[0][r]) * len(numbers[1][r]) for r in fit])
        kinds, index = np.unique(cells, return_inverse=True)
        source, table = kinds // width, np.ones(len(kinds))
        for _ in range(5):
            each = table[index]
            each = each / np.bincount(begins + places, each)[begins + places]
            counts = np.bincount(index, each)
            table = counts / np.bincount(source, counts)[source]
        common_words = np.bincount(np.concatenate([numbers[1][r] for r in fit]), minlength=width) / sum(sizes)
        seen = np.bincount(np.concatenate([numbers[0][r] for r in fit]), minlength=len(ids[0])) > 1
        for row in score:
            target = numbers[1][row][common_words[numbers[1][row]] > 0]
            own = numbers[0][row][seen[numbers[0][row]]]
            wanted = own[:, None] * width + target
            at = np.minimum(np.searchsorted(kinds, wanted), len(kinds) - 1)
            given = np.where(kinds[at] == wanted, table[at], 0.0).sum(0) + common_words[target]
            if len(target) and len(own):
                scores[row] = np.mean(np.log(given / (len(own) + 1) / common_words[target]))
    return scores


# --------------------------------------------------------------------------------------------------------------- speed


DEFAULT = [rule for rule in RULE_THRESHOLDS if rule not in (*SLOW, "near_duplicates")]
SPEEDS = {
    **{rule: [rule] for rule in RULE_THRESHOLDS},
    "all of these but lingua": [rule for rule in RULE_THRESHOLDS if rule not in SLOW],
    "all of these but lingua and near_duplicates": DEFAULT,
}


def speed(rules: list[str], text: list[Pair]) -> float:
    """Pairs a second of CPU."""
    cleaner = Cleaner(FilterConfig(rules={"held_out": False, **dict.fromkeys(rules, True)}), ("en", "de"))
    batches = [text[first : first + BATCH_ROWS] for first in range(0, len(text), BATCH_ROWS)]
    raw = [RawBatch(0, [a for a, _ in batch], [b for _, b in batch]) for batch in batches]
    for batch in islice(raw, 1):
        cleaner.clean(batch)  # loads the models
    begin = time.process_time()
    for batch in raw:
        cleaner.clean(batch)
    return len(text) / (time.process_time() - begin)


if __name__ == "__main__":
    main()
