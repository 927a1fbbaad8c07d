"""The model card: README.md of a model folder, and of what is exported from it, with the header that the Hub reads.

A card that still has its mark is written anew with its folder, except for the licence; without it, it is the user's.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.config.metrics import MEASURES, TRANSLATION_MEASURES
from dist_transformer.config.schema import ModelConfig
from dist_transformer.errors import UserError
from dist_transformer.files import write_text
from dist_transformer.run.evaluations import search_text

CARD = "README.md"
MARK = "<!-- Written by dist-transformer. Delete this line to keep the page as it is. -->"
LICENSE_UNKNOWN = "unknown"
_SCORES = re.compile(r"(?<=^## Scores\n\n).*?(?=\n\n## )", re.MULTILINE | re.DOTALL)
_ABOUT = re.compile(r"(?<=\n)# .*?(?=\n\n## How to load it\n)", re.DOTALL)
_LICENSE = re.compile(r"\A---\n(?:.*\n)*?license: *(.+)\n")
_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_LANGUAGE = re.compile(r"[a-z]{2,3}")


@dataclass(frozen=True)
class Origin:
    """Where a model comes from. `how` completes "An encoder-decoder Transformer"; `data`: a line for each corpus."""

    how: str = ""
    data: Sequence[str] = ()


def model_card(
    config: ModelConfig, information: dict[str, Any], parameters: int, origin: Origin, before: Path | None = None
) -> str:
    """Text of the card of a new model folder. `before`: the older card, whose licence is kept."""
    about = _render(
        "model_card_about.md", **information, source=information["source_language"],
        target=information["target_language"], parameters=parameters, config=config, origin=origin.how, data=origin.data,
    )  # fmt: skip
    license_name = _license(read_card(before)) if before is not None else LICENSE_UNKNOWN
    return _card("", license_name, information, about)


def exported_card(kind: str, card: str, information: dict[str, Any], **of_kind: Any) -> str:
    """The card of an exported folder: that of its model folder (`card`), with how to load it there (`of_kind`: its values)."""
    about = _ABOUT.search(card)
    return _card(kind, _license(card), information, about[0] if about else _HEADER.sub("", card), **of_kind)


def add_scores(model: Path, name: str, scores: dict[str, Any]) -> None:
    """Puts the scores of a corpus into the card of a model folder, if there is one with its mark that can be written."""
    path, text = model / CARD, read_card(model / CARD)
    if MARK not in text or (found := _SCORES.search(text)) is None:
        return
    measured = [
        f"{MEASURES[key].name} {scores[key]:{MEASURES[key].form}} (`{scores[f'{key}_signature']}`)"
        for key in TRANSLATION_MEASURES
        if key in scores
    ]
    start = f"- {name}:"
    line = f"{start} {', '.join(measured)}; {scores['pairs']:,} pairs, {search_text(scores)}"
    others = [each for each in found[0].splitlines() if each.startswith("- ") and not each.startswith(start)]
    with suppress(OSError, UserError):  # the scores are kept elsewhere too
        write_text(path, text[: found.start()] + "\n".join([*others, line]) + text[found.end() :])


def _card(kind: str, license_name: str, information: dict[str, Any], about: str, **of_kind: Any) -> str:
    both = (information["source_language"], information["target_language"])
    languages = [language for language in dict.fromkeys(both) if _LANGUAGE.fullmatch(language)]
    of_all = {"license": license_name, "languages": languages, "mark": MARK, "about": about.strip()}
    return _render("model_card.md", kind=kind, **of_all, **of_kind)


def _license(card: str) -> str:
    found = _LICENSE.match(card)
    return found[1].strip() if found else LICENSE_UNKNOWN


def read_card(path: Path) -> str:
    """Text of a card; empty if there is none, or it cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(  # text, not HTML
        loader=PackageLoader("dist_transformer.interop"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return pages.get_template(template).render(**values)
