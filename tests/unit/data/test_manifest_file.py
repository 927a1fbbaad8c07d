"""The manifest survives its own JSON, and refuses what is missing, damaged or foreign."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dist_transformer.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    RowGroup,
    Shard,
    Split,
    TextColumns,
    TokenizerFiles,
    content_digest,
    verify_shards,
)
from dist_transformer.errors import DataError
from dist_transformer.files import file_sha256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    for name in ("train-00000", "train-00001"):
        (tmp_path / "shards" / f"{name}.parquet").write_bytes(name.encode() * 100)
    return tmp_path


@pytest.fixture
def manifest(folder: Path) -> Manifest:
    def shard(file: str, *groups: RowGroup) -> Shard:
        return Shard(file, (folder / file).stat().st_size, file_sha256(folder / file), groups)

    shards = (
        shard("shards/train-00000.parquet", RowGroup(4, 40, 44), RowGroup(3, 30, 33)),
        shard("shards/train-00001.parquet", RowGroup(2, 20, 22)),
    )
    splits = {"train": Split(shards, 9, 90, 99, 12, 13, 11, {"empty": 2})}
    tokenizer = TokenizerFiles("tokenizer/source.model", "tokenizer/source.model", "aa", "aa")
    recipe = {"seed": 1, "train": {"demo": "train"}}
    digest = content_digest(recipe, tokenizer, splits, ("train",))
    return Manifest(digest, recipe, tokenizer, 800, 800, 0, 1, 2, "en", "de", splits, ("train",))


def test_a_saved_manifest_is_loaded_as_it_was(folder: Path, manifest: Manifest):
    manifest.save(folder)
    loaded = Manifest.load(folder)
    assert loaded == manifest
    assert loaded.splits["train"].row_groups == (RowGroup(4, 40, 44), RowGroup(3, 30, 33), RowGroup(2, 20, 22))


def test_the_digest_changes_with_recipe_shards_and_tokenizer(manifest: Manifest):
    recipe, tokenizer, splits = manifest.recipe, manifest.tokenizer, manifest.splits
    other_shards = {"train": replace(splits["train"], shards=splits["train"].shards[::-1])}
    as_text = {"train": replace(splits["train"], text=TextColumns("source", "target", ""))}
    digests = {
        content_digest(recipe, tokenizer, splits, ("train",)),
        content_digest({**recipe, "seed": 2}, tokenizer, splits, ("train",)),
        content_digest(recipe, replace(tokenizer, source_sha256="bb"), splits, ("train",)),
        content_digest(recipe, tokenizer, other_shards, ("train",)),
        content_digest(recipe, tokenizer, splits, ("train", "validation")),
        content_digest(recipe, tokenizer, as_text, ("train",)),
    }
    assert len(digests) == 6


def in_place(file: str, fingerprint: str = "ff", *rows: int) -> dict[str, Split]:
    groups = tuple(RowGroup(count, 10 * count, 11 * count) for count in rows or (4, 3))
    text = TextColumns("translation.en", "translation.de", "<2de> ")
    return {"train": Split((Shard(file, 100, fingerprint, groups),), 7, 70, 77, 256, 256, 7, {}, text)}


def test_files_in_place_count_by_name_fingerprint_and_row_groups_but_not_by_folder(manifest: Manifest):
    def digest(splits: dict[str, Split]) -> str:
        return content_digest(manifest.recipe, manifest.tokenizer, splits, ("train",))

    moved = {digest(in_place(file)) for file in ("/a/x.parquet", "/b/c/x.parquet", "s3://bucket/x.parquet")}
    others = {digest(in_place("/a/y.parquet")), digest(in_place("/a/x.parquet", "ee"))}
    others.add(digest(in_place("/a/x.parquet", "ff", 3, 4)))
    assert len(moved) == 1
    assert len(moved | others) == 4


def test_a_manifest_of_files_in_place_is_loaded_as_it_was(tmp_path: Path, manifest: Manifest):
    splits = in_place("s3://bucket/x.parquet")
    digest = content_digest(manifest.recipe, manifest.tokenizer, splits, ("train",))
    written = replace(manifest, digest=digest, splits=splits)
    written.save(tmp_path)
    assert Manifest.load(tmp_path) == written
    assert written.splits["train"].shards[0].is_in_place
    assert not manifest.splits["train"].shards[0].is_in_place


def test_a_file_in_place_that_is_gone_or_has_another_size_is_named(tmp_path: Path, manifest: Manifest):
    path = tmp_path / "own.parquet"
    path.write_bytes(bytes(100))
    whole = replace(manifest, splits=in_place(str(path)))
    verify_shards(tmp_path, whole)
    verify_shards(tmp_path, replace(manifest, splits=in_place("s3://bucket/x.parquet")))
    path.write_bytes(bytes(99))
    with pytest.raises(DataError, match=r"own\.parquet has 99 bytes, but had 100 when `prepare` looked at it"):
        verify_shards(tmp_path, whole)
    path.unlink()
    with pytest.raises(DataError, match=r"own\.parquet: a file of the training corpus is gone"):
        verify_shards(tmp_path, whole)


def test_a_folder_without_manifest_is_named_as_incomplete(tmp_path: Path):
    with pytest.raises(DataError, match=rf"{tmp_path}: no complete prepared corpus here \(manifest.json is missing\)"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"version": 2}', '{"version": 2, "tokenizer": {}}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str):
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json: (cannot be read|not a manifest).*prepare again"):
        Manifest.load(tmp_path)


def test_a_manifest_of_another_version_is_refused_with_both_versions(folder: Path, manifest: Manifest):
    manifest.save(folder)
    value = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps({**value, "version": 7}))
    with pytest.raises(DataError, match="manifest version 7, this program reads version 2"):
        Manifest.load(folder)


def test_a_manifest_edited_by_hand_is_refused(folder: Path, manifest: Manifest):
    manifest.save(folder)
    value = json.loads((folder / MANIFEST_NAME).read_text())
    value["recipe"]["seed"] = 5
    (folder / MANIFEST_NAME).write_text(json.dumps(value))
    with pytest.raises(DataError, match="its digest does not fit its content"):
        Manifest.load(folder)


def test_whole_shards_pass_the_check(folder: Path, manifest: Manifest):
    verify_shards(folder, manifest)


def test_a_missing_shard_is_named(folder: Path, manifest: Manifest):
    (folder / "shards/train-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"train-00001\.parquet: a shard of the prepared corpus is missing"):
        verify_shards(folder, manifest)


def test_a_shard_of_another_size_is_named_with_both_sizes(folder: Path, manifest: Manifest):
    path = folder / "shards/train-00000.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    size = manifest.splits["train"].shards[0].bytes
    with pytest.raises(DataError, match=rf"train-00000\.parquet: the shard has {size - 1} bytes.* says {size}"):
        verify_shards(folder, manifest)
