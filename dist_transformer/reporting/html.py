"""Pages as HTML in one file, made from the templates in templates/, which escape every text that is not marked as safe."""

import base64
import re
import shlex
import time
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dist_transformer import __version__
from dist_transformer.format import duration
from dist_transformer.reporting import formatting

_NOT_ALLOWED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_NUMBER = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?( ?[%a-zA-Z/]{1,8})?|nan|-?inf|-|")
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content security policy: nothing is loaded and nothing is executed, wherever the page is opened."""
LABEL = '<meta name="generator" content="Dist Transformer">'


def render(template: str, **values: Any) -> str:
    """The page that `template`, a file of templates/, makes of these values."""
    return _environment().get_template(template).render(**values, now=time.time())


def is_own_page(path: Path) -> bool:
    """True if this program wrote the page."""
    return path.is_file() and LABEL in path.read_text(encoding="utf-8", errors="replace")


@cache
def _environment() -> Environment:
    pages = Environment(
        loader=PackageLoader("dist_transformer.reporting"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_allowed,
        extensions=["jinja2.ext.do"],
    )
    pages.globals |= {name: value for name, value in vars(formatting).items() if callable(value) or name.isupper()}
    pages.globals |= {"LABEL": LABEL, "POLICY": POLICY, "version": __version__, "duration": duration}
    pages.globals |= {"column_kinds": column_kinds, "quote": lambda path: shlex.quote(str(path))}
    pages.globals["data_url"] = lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}"
    pages.filters["measure_name"] = formatting.measure_name
    return pages


def _allowed(content: Any) -> Any:
    """Returns what a template prints: None is empty, and characters that HTML does not allow are replaced."""
    if isinstance(content, Markup):
        return content
    return "" if content is None else _NOT_ALLOWED.sub("\N{REPLACEMENT CHARACTER}", str(content))


def column_kinds(rows: list[list[Any]], num_columns: int) -> list[str]:
    """Kind of each column of a table, a class of style.css: "number", "words" for long texts, or ""."""
    kinds = []
    for column in range(num_columns):
        cells = [escape(_allowed(row[column])) for row in rows]
        kind = "words" if any(len(cell) > 40 and " " in cell for cell in cells) else ""
        kinds.append("number" if any(cells) and all(map(_NUMBER.fullmatch, cells)) else kind)
    return kinds
