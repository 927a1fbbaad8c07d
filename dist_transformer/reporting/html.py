"""HTML from small parts. A plain `str` is text and is escaped; only `Html` is inserted unchanged.

table(["step", "BLEU"], [[1000, "21.5"]])       figure(png(data, "what it shows"), "Figure 1 <3")
"""

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from dist_transformer.reporting.page_style import STYLE

_NOT_ALLOWED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_NUMBER = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?( ?[%a-zA-Z/]{1,8})?|nan|-?inf|-|")
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content security policy: nothing is loaded and nothing is executed, wherever the page is opened."""
LABEL = '<meta name="generator" content="Dist Transformer">'
FOOTER = " by Dist Transformer "
"""Text that identifies pages of versions without a label."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | int | float | None


def html(content: Content) -> Html:
    """Content as HTML: text is escaped, None is empty; characters not allowed in HTML are replaced."""
    if isinstance(content, Html):
        return content
    text = "" if content is None else str(content)
    return Html(escape(_NOT_ALLOWED.sub("\N{REPLACEMENT CHARACTER}", text)))


def tag(name: str, *contents: Content, **attributes: str | None) -> Html:
    """Returns <name attributes>contents</name>; `class_` is class, `aria_label` aria-label; None is omitted."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    written = "".join(f' {key}="{html(value)}"' for key, value in given.items())
    return Html(f"<{name}{written}>{together(contents)}</{name}>")


def together(contents: Iterable[Content]) -> Html:
    return Html("".join(map(html, contents)))


def table(
    head: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    caption: str | None = None,
    best_row: int | None = None,
) -> Html:
    """A table in a scrollable box; columns of numbers are right-aligned, the first cell names its row.

    A `head` with only empty names is omitted.
    """
    cells = [[html(cell) for cell in row] for row in rows]
    kinds = [_kind([row[column] for row in cells]) for column in range(len(head))]
    names = together(tag("th", cell, scope="col", class_=_number(kind)) for cell, kind in zip(head, kinds, strict=True))
    top = tag("thead", tag("tr", names)) if any(head) else None
    body = together(
        tag("tr", _row(row, kinds), class_="best" if number == best_row else None) for number, row in enumerate(cells)
    )
    label = tag("caption", caption) if caption else None
    return tag("div", tag("table", label, top, tag("tbody", body)), class_="scroll", tabindex="0")


def facts(values: Iterable[tuple[str, Content]]) -> Html:
    """List of names and values, for the few that matter most."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in values), class_="facts")


def png(data: bytes, alt: str) -> Html:
    """A PNG image embedded in the page."""
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return Html(f'<img src="{source}" alt="{html(alt)}">')


def picture(svg: str, title: str, caption: str | None = None) -> Html:
    """A small chart with its title; `svg` comes from figures.py."""
    below = tag("figcaption", caption) if caption else None
    return tag("figure", tag("h3", title), Html(svg), below)


def details(summary: str, *contents: Content) -> Html:
    """Contents that unfold on a click on the summary."""
    return tag("details", tag("summary", summary), *contents)


def section(identity: str, title: str, *contents: Content) -> Html:
    return tag(
        "section", tag("h2", title, id=f"{identity}-title"), *contents, id=identity, aria_labelledby=f"{identity}-title"
    )


def document(title: str, header: Content, sections: Sequence[tuple[str, str, Html]], footer: str) -> str:
    """A complete page in one file.

    Args:
        sections: (identity, title, contents), in order; they also form the table of contents.
    """
    links = together(tag("li", tag("a", name, href=f"#{identity}")) for identity, name, _ in sections)
    body = together(
        [
            tag("header", tag("h1", title), header),
            tag("nav", tag("ul", links), aria_label="Contents"),
            tag("main", *(section(identity, name, contents) for identity, name, contents in sections)),
            tag("footer", footer),
        ]
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{LABEL}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{html(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def is_own_page(path: Path) -> bool:
    """True if this program wrote the page."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return LABEL in text or (POLICY in text and FOOTER in text)


def _kind(cells: list[Html]) -> str:
    """Kind of a column: "number", "words" for long texts, or ""."""
    if any(cells) and all(_NUMBER.fullmatch(cell) for cell in cells):
        return "number"
    return "words" if any(len(cell) > 40 and " " in cell for cell in cells) else ""


def _number(kind: str) -> str | None:
    return "number" if kind == "number" else None


def _row(cells: Sequence[Html], kinds: Sequence[str]) -> Html:
    first = tag("th", cells[0], scope="row", class_=_number(kinds[0]))
    return together(
        [first, *(tag("td", cell, class_=kind or None) for cell, kind in zip(cells[1:], kinds[1:], strict=True))]
    )
