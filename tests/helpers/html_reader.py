"""Reads a page as a browser would, strictly: what is opened is closed, and what the page is made of can be asked."""

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        elements: (name, attributes) of each element in order.
        tables: the texts of the cells of each table, row by row.
        headings: (level, text) in order.
        text: all text, outside of styles.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.headings: list[tuple[int, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    @staticmethod
    def read(path: Path) -> "Page":
        return Page(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1:] == [tag], f"</{tag}> closes {self._open[-1:]} at {self.getpos()}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data
        if any(re.fullmatch("h[1-6]", name) for name in self._open):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)

    def attributes(self, name: str) -> list[str]:
        """The values of one attribute, of all elements that have it."""
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def of(self, tag: str) -> list[dict[str, str]]:
        """The attributes of all elements of a name."""
        return [attributes for name, attributes in self.elements if name == tag]

    def table_with(self, *head: str) -> list[list[str]]:
        """The first table whose head begins with these cells."""
        return next(table for table in self.tables if table and table[0][: len(head)] == list(head))


def assert_sound(page: Page, html: str) -> None:
    """What every page of ours promises: one file that loads nothing, with a name for each thing that is linked to."""
    for attributes in page.attributes("src"):
        assert attributes.startswith("data:image/png;base64,")
    identities = page.attributes("id")
    assert len(identities) == len(set(identities))
    for link in page.attributes("xlink:href") + [link for link in page.attributes("href") if link.startswith("#")]:
        assert link.removeprefix("#") in identities
    assert {name for name, _ in page.elements} & {"script", "link", "iframe", "object", "embed", "base"} == set()
    style = "".join(re.findall("<style>(.*?)</style>", html, re.DOTALL))
    assert "@import" not in style
    assert "url(" not in style
    assert all(reference.startswith("#") for reference in re.findall(r"url\(([^)]*)\)", html))
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")
    assert all(image.get("alt") for image in page.of("img"))
    assert all(svg.get("aria-label") and svg.get("role") == "img" for svg in page.of("svg"))
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
