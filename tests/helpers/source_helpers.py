"""Writes sentence pairs in every format, and reads them back."""

import csv
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.data.sources.corpus import read_corpus

HARD_PAIRS = [
    ("12", "34"),
    ("NA", "null"),
    ('a "quoted" word', '"ein" Wort'),
    ("", "leer"),
    ("one\u2028line\x0cstill", "eine\x85Zeile"),
    ("käse, süß", "日本語 🙂"),
    ("2020-01-01", "1e5"),
    (" spaces ", "nan"),
    *((f"row {n}", f"Zeile {n}") for n in range(50)),
]


def read_all(corpus: CorpusConfig, data: DataConfig, batch_rows: int = 7) -> list[tuple[str | None, str | None]]:
    rows: list[tuple[str | None, str | None]] = []
    for batch in read_corpus(corpus, data, batch_rows):
        assert batch.first_row == len(rows)
        assert len(batch.source) == len(batch.target) <= batch_rows
        assert not batch.bad_encoding
        rows += zip(batch.source, batch.target, strict=True)
    return rows


def data_in(folder: Path, corpus: CorpusConfig, **settings: object) -> DataConfig:
    return DataConfig.model_validate({"root": str(folder), "train": corpus, **settings})


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def zipped(content: bytes) -> bytes:
    """An archive with one member, `text`."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(zipfile.ZipInfo("text"), content, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def pack(text: str, suffix: str) -> bytes:
    return PACKERS[suffix](text.encode())


def write_tsv(path: Path, pairs: list[tuple[str, str]], suffix: str) -> None:
    path.write_bytes(pack("".join(f"{source}\t{target}\n" for source, target in pairs), suffix))


def write_csv(path: Path, pairs: list[tuple[str, str]], suffix: str) -> None:
    plain = path.with_name("plain")
    with plain.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "en", "de"), *((str(i), *pair) for i, pair in enumerate(pairs))])
    path.write_bytes(pack(plain.read_bytes().decode(), suffix))


def write_jsonl(path: Path, pairs: list[tuple[str, str]], suffix: str) -> None:
    lines = (json.dumps({"en": source, "de": target}, ensure_ascii=False) for source, target in pairs)
    path.write_bytes(pack("".join(f"{line}\n" for line in lines), suffix))


def write_nested_jsonl(path: Path, pairs: list[tuple[str, str]], suffix: str) -> None:
    lines = (json.dumps({"translation": {"en": source, "de": target}}) for source, target in pairs)
    path.write_bytes(pack("".join(f"{line}\n" for line in lines), suffix))


def write_parquet(path: Path, pairs: list[tuple[str, str]], suffix: str) -> None:
    columns = {"en": [source for source, _ in pairs], "de": [target for _, target in pairs]}
    pq.write_table(pa.table(columns), path, row_group_size=20)


def write_nested_parquet(path: Path, pairs: list[tuple[str, str]], suffix: str) -> None:
    rows = [{"en": source, "de": target} for source, target in pairs]
    pq.write_table(pa.table({"id": list(range(len(rows))), "translation": rows}), path, row_group_size=20)


def write_arrow_stream(path: Path, pairs: list[tuple[str, str]], suffix: str) -> None:
    rows = [{"translation": {"en": source, "de": target}} for source, target in pairs]
    dataset = datasets.Dataset.from_list(rows)
    with datasets.arrow_writer.ArrowWriter(path=str(path), features=dataset.features, writer_batch_size=20) as writer:
        for row in dataset:
            writer.write(row)
        writer.finalize()


def write_arrow_file(path: Path, pairs: list[tuple[str, str]], suffix: str) -> None:
    table = pa.table({"en": [source for source, _ in pairs], "de": [target for _, target in pairs]})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, 20)


FORMATS = {
    "tsv": write_tsv,
    "csv": write_csv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "arrow": write_arrow_file,
}
