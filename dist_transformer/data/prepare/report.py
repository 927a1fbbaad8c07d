"""Writes the report of a prepared corpus: report.json, report.md and the figure lengths.png."""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dist_transformer.data.filters import RULES
from dist_transformer.data.prepare.statistics import PERCENTILES, Report
from dist_transformer.files import replacing, write_json, write_text
from dist_transformer.format import table

REPORT_NAME, REPORT_TEXT_NAME, LENGTHS_NAME = "report.json", "report.md", "lengths.png"
MOST_UNKNOWN_PERCENT = 1.0
log = logging.getLogger(__name__)


def write_report(folder: Path, report: Report) -> None:
    """Writes the three files into the prepared folder; warns of text that the tokenizer does not know."""
    for name, each in report.value["corpora"].items():
        for side in ("source", "target"):
            if (percent := each[f"{side}_lengths"]["unknown_percent"]) > MOST_UNKNOWN_PERCENT:
                log.warning(
                    f"{name}: {percent} % of its {side} tokens are unknown: the tokenizer has no pieces for this text. Give "
                    "one of its language, or a larger tokenizer.character_coverage or vocabulary_size"
                )
    write_json(folder / REPORT_NAME, report.value)
    write_text(folder / REPORT_TEXT_NAME, report_text(report.value))
    with replacing(folder / LENGTHS_NAME) as temporary:
        _draw_lengths(report, temporary)


def report_text(report: dict[str, Any]) -> str:
    """Returns the report as Markdown."""
    corpora: dict[str, dict[str, Any]] = report["corpora"]
    sizes = [[name, *_numbers(each[key] for key in _SIZES)] for name, each in corpora.items()]
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


_SIZES = ("read_rows", "rows", "source_tokens", "target_tokens")


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


def _draw_lengths(report: Report, path: Path) -> None:
    # A Figure without pyplot: it opens no window and keeps no state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for side, counts in (("source", report.source_lengths), ("target", report.target_lengths)):
        axes.stairs(counts, [length - 0.5 for length in range(len(counts) + 1)], label=side, fill=True, alpha=0.4)
    axes.set(xlabel="tokens, the end of sentence counted", ylabel="training pairs", title="Lengths of sentences")
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
