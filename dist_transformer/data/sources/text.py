"""Processing of sentences between their file and the tokenizer: decoding, Unicode normalization, tags."""

import unicodedata
from collections.abc import Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

Texts = list[str | None]
"""One side of some pairs; None where a table has no value."""
Normalization = Literal["none", "NFC", "NFKC"]


def decoded(lines: Sequence[bytes | None]) -> tuple[Texts, list[int]]:
    """Decodes lines; returns the texts, with U+FFFD for each bad byte, and the positions of invalid UTF-8."""
    try:
        return [None if line is None else line.decode("utf-8") for line in lines], []
    except UnicodeDecodeError:
        texts = [None if line is None else line.decode("utf-8", errors="replace") for line in lines]
        again = [None if text is None else text.encode() for text in texts]
        return texts, [position for position, line in enumerate(lines) if line != again[position]]


def normalized(texts: Texts, form: Normalization) -> Texts:
    """Converts the texts to a Unicode form."""
    if form == "none":
        return texts
    return [None if text is None else unicodedata.normalize(form, text) for text in texts]


def tag_prefix(tags: Sequence[str]) -> str:
    """Returns the prefix of each source sentence of a corpus with these tags."""
    return "".join(f"{tag} " for tag in tags)


def tagged(texts: Texts, prefix: str) -> Texts:
    """Prepends the tags to source sentences. A blank sentence stays blank, to be dropped as such."""
    if not prefix:
        return texts
    return [f"{prefix}{text}" if text and not text.isspace() else text for text in texts]


def text_column(table: pa.Table | pa.RecordBatch, name: str) -> pa.ChunkedArray:
    """Returns a column by its name; dots reach into nested ones: translation.en."""
    names = table.schema.names
    head, *rest = [name] if name in names else name.split(".")
    column = table.column(head)
    for field in rest:
        column = pc.struct_field(column, field)
    return column


def is_text(kind: pa.DataType) -> bool:
    """True if a column of this type has text (or only nulls)."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(check(kind) for check in checks)
