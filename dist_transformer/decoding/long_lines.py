"""Lines too long to be translated at once: they are cut into parts, whose translations are joined: docs/translate.md."""

import re
import unicodedata
from collections.abc import Callable, Sequence

from dist_transformer.errors import UserError

TAGS = re.compile(r"(?:(?:<[^<>\s]+>|>>[^<>\s]+<<|__\S+__)\s+)*")
BREAKS = (
    re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]]*+\s+|[。！？｡]+[」』）】”’]*\s*"),  # noqa: RUF001  (these are full stops)
    re.compile(r"\s+"),
    re.compile(r"."),
)
"""Places to cut a line: after a match of the first pattern that matches inside the line. A run of punctuation is
matched from its beginning only: otherwise a line of full stops would take quadratic time."""
WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "FULLWIDTH", "THAI", "LAO", "KHMER", "MYANMAR")
"""First words of the Unicode names of characters between which no space is written."""


def cut_line(line: str, num_tokens: Callable[[str], int], max_tokens: int) -> list[str]:
    """Parts of the line of at most `max_tokens`, its tags before each; without tags, they concatenate to the line.
    Raises UserError: a single character, with the tags, has more tokens."""
    tags = TAGS.match(line)
    assert tags is not None, "it matches nothing too"
    return [tags[0] + part for part in _cut(line[tags.end() :].strip(), tags[0], num_tokens, max_tokens)]


def join_parts(texts: Sequence[str]) -> str:
    """Joins the translations of the parts of a line, with spaces if their script uses them."""
    joined = ""
    for text in filter(None, texts):
        no_space = not joined or without_spaces(joined[-1]) or without_spaces(text[0])
        joined += text if no_space else f" {text}"
    return joined


def _cut(text: str, tags: str, num_tokens: Callable[[str], int], max_tokens: int) -> list[str]:
    if num_tokens(tags + text) <= max_tokens:
        return [text]
    if len(text) < 2:
        raise UserError(
            f"“{tags}{text}”: {num_tokens(tags + text)} tokens, and cannot be cut into parts of at most {max_tokens}: raise "
            "--max-source-tokens (decoding.max_source_tokens)"
        )
    middle = _break_near_the_middle(text)
    halves = (text[:middle].rstrip(), text[middle:].lstrip())
    return [part for half in halves for part in _cut(half, tags, num_tokens, max_tokens)]


def _break_near_the_middle(text: str) -> int:
    for pattern in BREAKS:
        inside = (found.end() for found in pattern.finditer(text) if found.end() < len(text))
        if place := min(inside, key=lambda place: abs(2 * place - len(text)), default=0):
            return place
    raise AssertionError("a text of two characters has a place between them")


def without_spaces(character: str) -> bool:
    """Returns True for a character of a script that writes no spaces between words."""
    return unicodedata.name(character, "").startswith(WITHOUT_SPACES)
