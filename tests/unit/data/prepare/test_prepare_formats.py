"""Prepared corpora of former formats: used, or continued, as they are; what they cannot do is prepared anew or refused."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_helpers import (
    PAIRS,
    config_in,
    config_of,
    rows_in,
    write_text,
    write_tsv,
)
from web_server import web_server

from dist_transformer.config.schema import Config
from dist_transformer.data.filters import HeldOut
from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.manifest import MANIFEST_NAME, Manifest, content_digest, json_digest
from dist_transformer.data.prepare.claims import WORK_FOLDER
from dist_transformer.data.prepare.preparation import LOCK_NAME, prepare, prepared_folder
from dist_transformer.data.prepare.state import PrepareState
from dist_transformer.data.recipe import (
    FORMAT_BEFORE_RULES,
    FORMER_RULES,
    PREPARED_FORMAT,
    make_recipe,
    not_held_out,
    recipe_of_format,
    recipe_without_beginnings,
)
from dist_transformer.data.sentences import Sentences
from dist_transformer.errors import CheckpointError, DataError
from dist_transformer.training.checkpoint.checkpoints import Checkpoint
from dist_transformer.training.run_data import RunData


def as_before(config: Config) -> Manifest:
    """Prepares without rules, and makes the folder look as the version before left it, in its place."""
    off = config.data.filters.model_copy(update={"rules": {"held_out": False}})
    config = config.model_copy(update={"data": config.data.model_copy(update={"filters": off})})
    manifest = in_format(FORMAT_BEFORE_RULES, config)
    assert not {"rules", "scores"} & manifest.recipe["filters"].keys()
    return manifest


def in_format(version: int, config: Config) -> Manifest:
    """Prepares, and makes the folder look as a version of this format left it, in its place."""
    recipe = recipe_without_beginnings(recipe_of_format(version, make_recipe(config), config))
    assert recipe["format"] == version
    return _as_if_made_with(recipe, config)


def _as_if_made_with(recipe: dict[str, Any], config: Config) -> Manifest:
    manifest, folder = prepare(config), prepared_folder(config)
    digest = content_digest(recipe, manifest.tokenizer, manifest.splits, manifest.training)
    value = json.loads((folder / MANIFEST_NAME).read_text()) | {"recipe": recipe, "digest": digest}
    (folder / MANIFEST_NAME).write_text(json.dumps(value))
    target = folder if config.data.prepared else folder.with_name(json_digest(recipe)[:16])
    return Manifest.load(folder.rename(target))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "is_named"),
    [(PREPARED_FORMAT, True), *product([FORMER_RULES, FORMAT_BEFORE_RULES], [True, False])],
)
def test_a_former_folder_of_text_whose_server_tells_no_version_is_taken_as_it_is(
    tmp_path: Path, version: int, is_named: bool
):
    write_text(tmp_path, PAIRS[:100])
    with web_server(tmp_path, ranges=False) as server:
        server.silent = True
        prepared = str(tmp_path / "mine") if is_named else None
        rules = {"filters": {"rules": {"held_out": version != FORMAT_BEFORE_RULES}}}
        config = config_of(tmp_path, data={"root": server.address, "prepared": prepared, **rules})
        assert "beginning_sha256" in str(make_recipe(config))
        former = in_format(version, config)
        assert "beginning_sha256" not in str(former.recipe)
        assert prepare(config) == former
        assert not not_held_out(config.data, former.recipe)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_folder_of_the_version_before_is_taken_as_it_is(tmp_path: Path, is_named: bool):
    write_text(tmp_path, [*PAIRS[:100], PAIRS[550]])
    data = {**config_of(tmp_path).data.model_dump(), "prepared": str(tmp_path / "mine") if is_named else None}
    config = config_of(tmp_path, data=data)
    manifest = as_before(config)
    assert prepare(config) == manifest
    assert manifest.splits["train"].rows == 101
    asked = config_of(tmp_path, data={**data, "filters": {"rules": {"letters": 0.1}}})
    if is_named:
        with pytest.raises(
            DataError, match=r"prepared with other settings(.|\n)*filters\.rules\.letters: None in the folder"
        ):
            prepare(asked)
    else:
        assert prepare(asked).splits["train"].rows == 100


def test_reading_in_place_goes_on_with_the_keys_tags_and_numbers_of_the_format_that_the_folder_has(tmp_path: Path):
    odd = [
        ("Cafe\u0301 Anna", "Cafe\u0301 Anna"),
        ("He wrote 1\u2009000 letters", "Er schrieb 1000 Briefe"),
        ("She wrote that <laughs> it is fine", "Sie schrieb, dass es <lacht> gut ist"),
    ]
    rows = [{"en": source, "de": target} for source, target in [*PAIRS[:50], *odd]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "web.parquet")
    write_tsv(tmp_path / "test.tsv", [("Caf\u00e9 Anna", "Caf\u00e9 Anna")])
    data = {"train": {"path": "web.parquet"}, "test": {"path": "test.tsv"}, "on_the_fly": True}
    config = config_in(tmp_path, PAIRS[:9], {"held_out": True, "markup": 0.9, "numbers": True}, **data)

    def read(manifest: Manifest) -> dict[int, int]:
        """Returns the rows with their source lengths."""
        reader = RowReader(prepared_folder(config), manifest, config.data, 0.0, 1)
        parts = [*reader.read_first_pass(0)]
        return {row: size for part in parts for row, size in zip(part.row_ids, part.source.lengths, strict=True)}

    new = read(prepare(config))
    manifest = in_format(FORMER_RULES, config)
    assert prepare(config) == manifest
    former = read(manifest)
    assert [sorted(row for row in rows if row >= 50) for rows in (new, former)] == [[51, 52], [50, 52]]
    assert [row for row in new if row in former and new[row] != former[row]] == [52]


@pytest.mark.parametrize("version", [FORMER_RULES, FORMAT_BEFORE_RULES])
def test_a_preparation_that_a_version_before_began_is_refused_and_begins_anew_without_its_folder(
    tmp_path: Path, version: int
):
    write_text(tmp_path, PAIRS[:50])
    config = config_of(tmp_path, data={"prepared": str(tmp_path / "mine")})
    folder = tmp_path / "mine"
    (folder / WORK_FOLDER).mkdir(parents=True)
    PrepareState(make_recipe(config) | {"format": version}).save(folder / WORK_FOLDER)
    with pytest.raises(DataError) as refused:
        prepare(config)
    assert str(refused.value) == (
        f"{folder}: was begun by a version of this program that prepares format {version}, this one prepares "
        f"{PREPARED_FORMAT}: remove the folder, and it is prepared anew; or let that version complete it"
    )
    shutil.rmtree(folder)
    assert prepare(config).splits["train"].rows == 50


@pytest.mark.parametrize("is_complete", [True, False])
def test_what_a_newer_version_has_made_is_left_to_it(tmp_path: Path, is_complete: bool):
    write_text(tmp_path, PAIRS[:50])
    config, newer = config_of(tmp_path, data={"prepared": str(tmp_path / "mine")}), PREPARED_FORMAT + 1
    if is_complete:
        _as_if_made_with(make_recipe(config) | {"format": newer}, config)
    else:
        (tmp_path / "mine" / WORK_FOLDER).mkdir(parents=True)
        PrepareState(make_recipe(config) | {"format": newer, "normalization": "?"}).save(
            tmp_path / "mine" / WORK_FOLDER
        )
    with pytest.raises(DataError) as refused:
        prepare(config)
    assert str(refused.value) == (
        f"{tmp_path / 'mine'}: of a newer version (format {newer}, this reads {PREPARED_FORMAT}): use that one"
    )


@pytest.mark.slow
@pytest.mark.parametrize("on_the_fly", [False, True])
@pytest.mark.parametrize("version", [FORMER_RULES, FORMAT_BEFORE_RULES])
def test_a_run_whose_corpus_of_a_former_format_is_gone_resumes_with_the_same_files_and_with_no_others(
    tmp_path: Path, version: int, on_the_fly: bool
):
    write_text(tmp_path, PAIRS[:50])
    config = config_of(tmp_path, data={"on_the_fly": on_the_fly})
    as_former = as_before if version == FORMAT_BEFORE_RULES else partial(in_format, version)
    former = RunData(config, tmp_path / "gone", as_former(config))
    state = {"position": former.start().to_json(), "batches": 0, "settings": {"data": {"prepared": str(former.folder)}}}
    checkpoint = Checkpoint(tmp_path, json.loads(json.dumps(state | {"recipe": former.recipe()})))
    shutil.rmtree(tmp_path / "runs")
    now = RunData(config, prepared_folder(config), prepare(config))
    assert now.manifest.recipe["format"] == PREPARED_FORMAT
    assert now.position_of(checkpoint) == now.start()
    shards = (replace(now.manifest.splits["train"].shards[0], sha256="0" * 64),)
    splits = now.manifest.splits | {"train": replace(now.manifest.splits["train"], shards=shards)}
    other = RunData(config, now.folder, replace(now.manifest, splits=splits))
    refused = rf"prepared with format: {version} -> {PREPARED_FORMAT}\nThe run has a corpus of another version: "
    with pytest.raises(
        CheckpointError, match=rf"{refused}restore {re.escape(str(former.folder))}, or prepare it with th"
    ):
        other.position_of(checkpoint)


def test_a_run_that_reads_in_place_does_not_go_on_by_the_rules_of_another_format(tmp_path: Path):
    pq.write_table(
        pa.Table.from_pylist([{"en": source, "de": target} for source, target in PAIRS[:50]]), tmp_path / "web.parquet"
    )
    config = config_in(tmp_path, PAIRS[:9], {"markup": 0.9}, train={"path": "web.parquet"}, on_the_fly=True)
    former = RunData(config, tmp_path / "gone", in_format(FORMER_RULES, config))
    state = {"position": former.start().to_json(), "batches": 0, "recipe": json.loads(json.dumps(former.recipe()))}
    shutil.rmtree(tmp_path / "runs")
    now = RunData(config, prepared_folder(config), prepare(config))
    with pytest.raises(CheckpointError, match=rf"prepared with format: {FORMER_RULES} -> {PREPARED_FORMAT}\n"):
        now.position_of(Checkpoint(tmp_path, state))


def test_what_was_prepared_or_begun_by_a_version_that_compared_each_side_with_its_own_stays_as_it_is(tmp_path: Path):
    write_text(tmp_path, [*PAIRS[:50], PAIRS[310], PAIRS[311][::-1]])
    write_tsv(tmp_path / "test.tsv", PAIRS[305:315])
    config = config_of(tmp_path, data={**config_of(tmp_path).data.model_dump(), "test": {"path": "test.tsv"}})
    folder = prepared_folder(config)
    folder.mkdir(parents=True)
    sides = (np.unique(Sentences([pair[side] for pair in PAIRS[305:315]]).keys) for side in (0, 1))
    (folder / LOCK_NAME).touch()
    HeldOut(*sides).save(folder)
    assert rows_in(config) == [*range(50), 51]
    shutil.rmtree(folder)
    assert rows_in(config) == [*range(50)]
