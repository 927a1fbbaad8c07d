"""A small aligned corpus with known faults, its configuration, and what must come out of preparing it."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import Manifest, verify_shards
from dist_transformer.data.prepare.preparation import load_tokenizer, prepare, prepared_folder
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.files import file_sha256

SMALL = {"BATCH_ROWS": 50, "CHUNK_ROWS": 150, "SHARD_ROWS": 180}
"""Sizes in `prepare` that make several batches, chunks and shards of a corpus of 500 rows."""
PAIRS = list(islice(demo_pairs("test"), 600))
NUM_TRAIN = 500
TEXT = {"source": "train.en", "target": "train.de"}


def write_text(folder: Path, train: list[tuple[str, str]] | None = None) -> None:
    """train.en, train.de, validation.en and validation.de in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("train", train or PAIRS[:NUM_TRAIN]), ("validation", PAIRS[NUM_TRAIN:])):
        for side, language in ((0, "en"), (1, "de")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    """The configuration of `write_text(folder)`; `sections` are merged over it."""
    value: dict[str, dict[str, Any]] = {
        "run": {"root": str(folder / "runs"), "seed": 3},
        "data": {
            "root": str(folder),
            "train": TEXT,
            "validation": {"source": "validation.en", "target": "validation.de"},
            "row_group_rows": 32,
        },
        "tokenizer": {"vocabulary_size": 240},
    }
    for name, section in sections.items():
        value[name] = {**value.get(name, {}), **section}
    return Config.model_validate(value)


def in_fixed_folder(tmp_path: Path, **settings: object) -> dict[str, object]:
    return {**config_of(tmp_path).data.model_dump(), "prepared": str(tmp_path / "mine"), **settings}


def mixture_of(**corpora: dict[str, Any]) -> dict[str, Any]:
    """The section `data` of `config_of` for several training corpora."""
    return {"train": None, "mixture": {"corpora": corpora}}


def read_split(folder: Path, manifest: Manifest, split: str) -> list[tuple[int, str, str]]:
    """(row id, source text, target text) of every row of a prepared split of token ids, decoded."""
    tokenizer = load_tokenizer(folder, manifest.tokenizer)
    rows = []
    for shard in manifest.splits[split].shards:
        for row in pq.read_table(folder / shard.file).to_pylist():
            assert row["source"][-1] == row["target"][-1] == manifest.eos_id
            assert manifest.bos_id not in row["source"] + row["target"]
            texts = (tokenizer.decode_source(row["source"]), tokenizer.decode_target(row["target"]))
            rows.append((row["row_id"], *texts))
    return rows


def check_shards(folder: Path, manifest: Manifest) -> None:
    """Checks every shard that `prepare` wrote, byte by byte."""
    verify_shards(folder, manifest)
    for shard in (shard for split in manifest.splits.values() for shard in split.shards if not shard.is_in_place):
        assert file_sha256(folder / shard.file) == shard.sha256, shard.file


def config_in(folder: Path, pairs: list[tuple[str, str]], rules: dict[str, Any], **data: Any) -> Config:
    write_text(folder, pairs)
    given = config_of(folder).data.model_dump()
    return config_of(folder, data={**given, "filters": {"rules": {"held_out": False, **rules}}, **data})


def write_tsv(path: Path, pairs: list[tuple[str, str]]) -> None:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")


def rows_in(config: Config, split: str = "train") -> list[int]:
    manifest = prepare(config)
    return sorted(row for row, _, _ in read_split(prepared_folder(config), manifest, split))


def report_of(config: Config) -> dict[str, Any]:
    prepare(config)
    return json.loads((prepared_folder(config) / "report.json").read_text(encoding="utf-8"))["corpora"]
