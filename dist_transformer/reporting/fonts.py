"""Characters that the font of the figures can draw, so that no text of a run makes drawing fail or warn."""

from functools import cache

FAMILY = "DejaVu Sans"
LONGEST_LABEL = 52
UNKNOWN_CHARACTER = "\N{WHITE SQUARE}"


def drawable(text: str) -> str:
    """`text` with a square for each character that the font lacks."""
    return "".join(character if ord(character) in _characters() else UNKNOWN_CHARACTER for character in text)


def legend_text(text: str) -> str:
    """Escapes `text` for matplotlib's legends and titles: not parsed as mathematics, nor hidden for a leading "_"."""
    cut = text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    escaped = drawable(cut).replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


@cache
def _characters() -> frozenset[int]:
    """The code points that the font has."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties(family=FAMILY))).get_charmap())
