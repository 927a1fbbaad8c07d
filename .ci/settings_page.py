"""Writes docs/settings.md, the reference of all settings, from their definitions in dist_transformer/config."""

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dist_transformer.config.data_schema import CorpusConfig
from dist_transformer.config.schema import Config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Every key of a configuration: type, default, meaning. `dist-transformer config check` reports all problems of a file at
once; `dist-transformer config show` prints it with every default. Keys can also be given on the command line:
`training.max_steps=1000`. This page is written by `python .ci/settings_page.py`; do not edit it.
"""
WORDS = {str: "text", bool: "true or false", int: "whole number", float: "number", type(None): "none"}
LIMITS = {"gt": "> {}", "ge": ">= {}", "lt": "< {}", "le": "<= {}"}
HUGE = 2**31


def inner_sections(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from inner_sections(part)


def words_of(annotation: object) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return words_of(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words_of(each) for each in arguments if each is not type(None))
    if origin in (tuple, list):
        return f"list of {words_of(arguments[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[section](#{anchor_of(annotation)})"
    return WORDS.get(annotation, "any")  # type: ignore[call-overload, no-any-return]


def limits_of(field: FieldInfo) -> str:
    """The bounds of a number, but for those that only say that it fits its type."""
    found = []
    optional = [each for part in typing.get_args(field.annotation) for each in getattr(part, "__metadata__", ())]
    for part in (*field.metadata, *optional):
        for each in (part, *getattr(part, "metadata", ())):
            for name, form in LIMITS.items():
                bound = getattr(each, name, None)
                if bound is not None and abs(bound) < HUGE and (form.format(f"{bound:g}")) not in found:
                    found.append(form.format(f"{bound:g}"))
    return ", ".join(each for each in found if "=" not in each or each.replace("=", "") not in found)


def anchor_of(section: type[BaseModel]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", section.__name__.removesuffix("Config")).lower()


def default_of(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return ""
    if value is None or value in ((), {}, ""):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table_of(section: type[BaseModel]) -> str:
    """The table of one section."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        limits = limits_of(field)
        kind = words_of(field.annotation) + (f" {limits}" if limits else "")
        meaning = (field.description or "").replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
        meaning = meaning.replace("*", "\\*").replace("_", "\\_")
        rows.append(
            f"| `{name}` | {kind.replace('<', '&lt;').replace('>', '&gt;')} | {default_of(field)} | {meaning} |"
        )
    return "\n".join(rows)


def page() -> str:
    """The whole page: the sections of the file in their order, then the sections inside them."""
    sections: dict[type[BaseModel], str] = {}
    waiting = [(name, each) for name, field in Config.model_fields.items() for each in inner_sections(field.annotation)]
    while waiting:
        key, section = waiting.pop(0)
        if section in sections:
            continue
        sections[section] = key
        for name, field in section.model_fields.items():
            waiting += [(f"{key}.{name}", each) for each in inner_sections(field.annotation)]
    text = HEAD
    for section, key in sections.items():
        place = "each corpus of `data`" if section is CorpusConfig else f"`{key}`"
        doc = " ".join((section.__doc__ or "").split())
        text += (
            f"\n## {anchor_of(section).replace('-', ' ').capitalize()}\n\nBelow {place}. {doc}\n\n{table_of(section)}\n"
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
