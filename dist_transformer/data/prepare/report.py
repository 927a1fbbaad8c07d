"""Writes the report of a prepared corpus (rows, tokens, lengths, dropped pairs): report.json, report.md, lengths.png."""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np

from dist_transformer.data.filters import RULES
from dist_transformer.data.manifest import Split
from dist_transformer.data.prepare.state import Chunk, num_tokens
from dist_transformer.files import replacing, write_json, write_text
from dist_transformer.format import table

REPORT_NAME, REPORT_TEXT_NAME, LENGTHS_NAME = "report.json", "report.md", "lengths.png"
ALWAYS = ("bad_encoding", "empty", "identical", "plugin", "too_long", "length_ratio")
"""Rules that the report names even if they drop nothing."""
PERCENTILES = (50, 90, 95, 99, 100)
MOST_UNKNOWN_PERCENT = 1.0
CUT_TEXT = {
    "@@(?: |$)": "subword-nmt (gir@@ l): give the text as it was before; sed 's/@@ //g' joins it",
    "\u2581": "sentencepiece (\u2581girl): give the text as it was before; a model of pieces is trained here",
    "(^| )&(apos;|quot; )|&apos; | @-@ ": "Moses (&apos; &quot; @-@): give it detokenised, or use evaluate --tokenised spaces",
}
MOST_CUT_SHARE = 0.02  # of Moses' German of WMT 3 lines in 100 have a sign, of 200,000 lines of plain text none
MOST_CHANGED_SHARE = 0.05
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportedCorpus:
    """Input of the report about a corpus.

    Attributes:
        lengths: counts of the rows whose lengths are shown: all, or a sample if they are not tokenized yet.
        counts: counts of all rows; of a sample if they are read in place.
    """

    split: Split
    is_training: bool
    lengths: Chunk
    counts: Chunk


def write_report(folder: Path, plugin: str | None, corpora: dict[str, ReportedCorpus]) -> None:
    """Writes the three files into the prepared folder; warns of text that the tokenizer does not know.

    `plugin`: the rule of that name, as the user gave it.
    """
    report: dict[str, Any] = {
        "corpora": {name: _contents(corpus) for name, corpus in corpora.items()},
        "plugin": plugin,
    }
    for name, each in report["corpora"].items():
        for side in ("source", "target"):
            if (percent := each[f"{side}_lengths"]["unknown_percent"]) > MOST_UNKNOWN_PERCENT:
                log.warning(
                    f"{name}: {percent} % of its {side} tokens are unknown: the tokenizer has no pieces for this text. Give "
                    "one of its language, or a larger tokenizer.character_coverage or vocabulary_size"
                )
    write_json(folder / REPORT_NAME, report)
    write_text(folder / REPORT_TEXT_NAME, report_text(report))
    with replacing(folder / LENGTHS_NAME) as temporary:
        _draw_lengths(Chunk.together([each.lengths for each in corpora.values() if each.is_training]), temporary)


def warn_of_cut_text(name: str, texts: Sequence[str | None]) -> None:
    """Warns if another program seems to have cut text into pieces or tokens, of which BLEU is higher than of words."""
    for sign, program in CUT_TEXT.items():
        if (count := sum(re.search(sign, text) is not None for text in texts if text)) > MOST_CUT_SHARE * len(texts):
            log.warning("%s: %d of %d lines look cut by %s. Its BLEU is far too high", name, count, len(texts), program)


def warn_of_changed_text(name: str, targets: Sequence[str | None]) -> None:
    """Warns if many targets have characters, other than spaces, that nmt_nfkc replaces: NFKC, but for U+FF5E, and U+200C."""
    letters = {letter for text in targets for letter in text or "" if not letter.isspace()} - {"\uff5e"}
    changed = {each for each in letters if each == "\u200c" or normalize("NFKC", each) != normalize("NFC", each)}
    if (count := sum(not changed.isdisjoint(text or "") for text in targets)) > MOST_CHANGED_SHARE * len(targets):
        log.warning(
            f"{name}: {count} of {len(targets)} targets have characters that no translation will have, as the tokenizer "
            f"replaces them: {' '.join(map(repr, sorted(changed)[:8]))}; tokenizer.normalization: identity keeps them"
        )


def report_text(report: dict[str, Any]) -> str:
    """Returns the report as Markdown."""
    corpora: dict[str, dict[str, Any]] = report["corpora"]
    size_keys = ("read_rows", "rows", "source_tokens", "target_tokens")
    sizes = [[name, *_numbers(each[key] for key in size_keys)] for name, each in corpora.items()]
    rules = [rule for rule in RULES if any(rule in each["dropped"] for each in corpora.values())]
    dropped = [[name, *_numbers(each["dropped"].get(rule, 0) for rule in rules)] for name, each in corpora.items()]
    lengths = [
        [name, side, *_numbers(each[f"{side}_lengths"].values())]
        for name, each in corpora.items()
        for side in ("source", "target")
    ]
    percents = [f"{percent} %" for percent in PERCENTILES[:-1]]
    sections = [
        "# Prepared corpus",
        "\n".join(table(["corpus", "pairs read", "kept", "source tokens", "target tokens"], sizes, is_markdown=True)),
        *(
            f"{name}: tokenized on the fly, so tokens and lengths are estimated from its first "
            f"{each['estimated_from_rows']:,} pairs, and pairs too long or out of proportion are dropped in training."
            for name, each in corpora.items()
            if each["estimated_from_rows"] is not None
        ),
        "## Pairs dropped, by rule",
        "\n".join(table(["corpus", *rules], dropped, is_markdown=True)),
        *filter(None, ["\n".join(_examples(corpora))]),
        *([f"The rule plugin is `{report['plugin']}`."] if report.get("plugin") else []),
        "## Lengths in tokens, the end of sentence counted",
        "\n".join(table(["corpus", "side", "mean", *percents, "longest", "unknown, %"], lengths, is_markdown=True)),
        f"![how many training pairs have each length]({LENGTHS_NAME})",
    ]
    return "\n\n".join(sections) + "\n"


def _numbers(values: Iterable[float]) -> list[str]:
    return [f"{value:,}" for value in values]


def _examples(corpora: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields lines about repaired pairs, and examples of dropped ones."""
    for name, each in corpora.items():
        if each["repaired"]:
            yield f"- {name}: markup repaired in {each['repaired']:,} pairs"
        for rule, pairs in each["examples"].items():
            for pair in pairs:
                yield f"- {name}, dropped by {rule}: {' | '.join(json.dumps(text, ensure_ascii=False) for text in pair)}"


def _contents(corpus: ReportedCorpus) -> dict[str, Any]:
    split = corpus.split
    return {
        "training": corpus.is_training,
        "read_rows": split.read_rows,
        "rows": split.rows,
        "dropped": {rule: split.dropped.get(rule, 0) for rule in RULES if rule in ALWAYS or rule in split.dropped},
        "repaired": corpus.counts.repaired,
        "examples": corpus.counts.examples,
        "source_tokens": split.source_tokens,
        "target_tokens": split.target_tokens,
        "estimated_from_rows": corpus.lengths.read_rows if split.text else None,
        "source_lengths": _lengths(corpus.lengths.source_lengths, corpus.lengths.unknown[0]),
        "target_lengths": _lengths(corpus.lengths.target_lengths, corpus.lengths.unknown[1]),
    }


def _lengths(counts: Sequence[int], unknown: int) -> dict[str, float]:
    """Returns the mean and the percentiles of the lengths, and the percentage of tokens that are unknown."""
    rows_up_to, rows, tokens = np.cumsum(counts), sum(counts), num_tokens(counts)
    percentiles = {str(percent): int(np.searchsorted(rows_up_to, rows * percent / 100)) for percent in PERCENTILES}
    return {"mean": round(tokens / rows, 1), **percentiles, "unknown_percent": round(100 * unknown / tokens, 2)}


def _draw_lengths(training: Chunk, path: Path) -> None:
    # A Figure without pyplot: it opens no window and keeps no state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for side, counts in (("source", training.source_lengths), ("target", training.target_lengths)):
        axes.stairs(counts, [length - 0.5 for length in range(len(counts) + 1)], label=side, fill=True, alpha=0.4)
    axes.set(xlabel="tokens, the end of sentence counted", ylabel="training pairs", title="Lengths of sentences")
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
