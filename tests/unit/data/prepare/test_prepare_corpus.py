"""A prepared corpus holds every kept row once, in a shuffled order that depends on the seed alone."""

import itertools
from pathlib import Path
from uuid import uuid4

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_helpers import NUM_TRAIN, PAIRS, SMALL, check_shards, config_of, mixture_of, read_split, write_text

from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare import chunks, scan, shards
from dist_transformer.data.prepare.preparation import load_tokenizer, prepare, prepared_folder
from dist_transformer.data.prepare.shards import count_tokens, token_table, write_shard
from dist_transformer.errors import DataError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in SMALL.items():
        monkeypatch.setattr(chunks, name, rows)
    monkeypatch.setattr(shards, "SPILL_ROW_GROUP_ROWS", 40)


STAGES = ["scan", "tokenizer", "train", "validation", "shuffle train", "report"]


def rows_of(pairs: list[tuple[str, str]]) -> list[tuple[int, str, str]]:
    return [(number, *pair) for number, pair in enumerate(pairs)]


def test_every_row_comes_back_exactly_once_as_its_text(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path)
    manifest = prepare(config)
    folder = prepared_folder(config)
    rows = read_split(folder, manifest, "train")
    assert sorted(rows) == rows_of(PAIRS[:NUM_TRAIN])
    assert len(manifest.splits["train"].shards) == 3


@pytest.mark.parametrize("place", ["exp:1/prep", "~/prep", "./~/prep"])
def test_a_folder_may_have_a_colon_and_a_tilde_is_the_home(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pyarrow takes `exp:` for a protocol, and a tilde in front for the home."""
    write_text(tmp_path / "text")
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = config_of(tmp_path / "text", data={"prepared": place})
    manifest = prepare(config)
    folder = tmp_path / "home/prep" if place.startswith("~") else here / place
    assert manifest == Manifest.load(folder)
    assert sorted(read_split(folder, manifest, "train")) == rows_of(PAIRS[:NUM_TRAIN])
    assert [path.name for path in here.iterdir()] == ([] if place.startswith("~") else [Path(place).parts[0]])


def test_training_rows_are_shuffled_over_all_shards_and_validation_keeps_its_order(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path)
    manifest = prepare(config)
    folder = prepared_folder(config)
    order = [row for row, _, _ in read_split(folder, manifest, "train")]
    first_shard = order[: manifest.splits["train"].shards[0].row_groups[0].rows]
    assert {row // 150 for row in first_shard} == {0, 1, 2, 3}
    followers = sum(after == before + 1 for before, after in itertools.pairwise(order))
    assert followers < 10
    assert read_split(folder, manifest, "validation") == rows_of(PAIRS[NUM_TRAIN:])


def test_the_order_depends_on_the_seed_and_on_nothing_else(tmp_path: Path):
    write_text(tmp_path)
    orders = []
    for seed, folder in ((3, "a"), (3, "b"), (4, "c")):
        config = config_of(tmp_path, run={"root": str(tmp_path / folder), "seed": seed})
        manifest = prepare(config)
        orders.append((manifest.digest, [row[0] for row in read_split(prepared_folder(config), manifest, "train")]))
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[2][0]
    assert orders[0][1] != orders[2][1]


def test_the_manifest_counts_what_is_in_the_shards(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path)
    manifest = prepare(config)
    folder = prepared_folder(config)
    check_shards(folder, manifest)
    assert Manifest.load(folder) == manifest
    for split in manifest.splits.values():
        groups = []
        for shard in split.shards:
            file = pq.ParquetFile(folder / shard.file)
            assert file.num_row_groups == len(shard.row_groups)
            groups += [file.read_row_group(group).to_pylist() for group in range(file.num_row_groups)]
        assert all(len(group) <= 32 for group in groups)
        found = [tuple(sum(len(row[side]) for row in group) for side in ("source", "target")) for group in groups]
        assert found == [(group.source_tokens, group.target_tokens) for group in split.row_groups]
        assert [len(group) for group in groups] == [group.rows for group in split.row_groups]
        rows = [row for group in groups for row in group]
        assert split.rows == len(rows)
        assert split.source_tokens == sum(len(row["source"]) for row in rows)
        assert split.max_source_tokens == max(len(row["source"]) for row in rows)
        assert split.max_target_tokens == max(len(row["target"]) for row in rows)


def test_dropped_rows_are_counted_by_rule_and_the_others_keep_their_row_number(tmp_path: Path):
    pairs = list(PAIRS[:400])
    pairs[10] = ("", "leer")
    pairs[200] = ("same", "same")
    pairs[201] = ("long " * 300, pairs[201][1])
    pairs[399] = ("word " * 50, "Wort")
    write_text(tmp_path, pairs)
    text = (tmp_path / "train.en").read_bytes().split(b"\n")
    text[300] = b"caf\xe9"
    (tmp_path / "train.en").write_bytes(b"\n".join(text))
    filters = {"drop_identical": True, "bad_encoding": "drop", "max_tokens": 200}
    config = config_of(tmp_path, data={**config_of(tmp_path).data.model_dump(), "filters": filters})
    manifest = prepare(config)
    split = manifest.splits["train"]
    assert split.dropped == {"empty": 1, "identical": 1, "too_long": 1, "length_ratio": 1, "bad_encoding": 1}
    assert (split.read_rows, split.rows) == (400, 395)
    kept = [row for row in rows_of(pairs) if row[0] not in (10, 200, 201, 300, 399)]
    assert sorted(read_split(prepared_folder(config), manifest, "train")) == kept


def test_separate_vocabularies_have_a_model_each(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path, tokenizer={"shared": False, "vocabulary_size": 160, "type": "unigram"})
    manifest = prepare(config)
    folder = prepared_folder(config)
    assert manifest.tokenizer.source != manifest.tokenizer.target
    assert sorted(read_split(folder, manifest, "train")) == rows_of(PAIRS[:NUM_TRAIN])


def test_taken_models_are_copied_and_give_the_same_tokens(tmp_path: Path):
    write_text(tmp_path)
    trained = config_of(tmp_path)
    first = prepare(trained)
    model = prepared_folder(trained) / first.tokenizer.source
    taken = config_of(tmp_path, tokenizer={"source_model": str(model)})
    second = prepare(taken)
    folder = prepared_folder(taken)
    assert (folder / second.tokenizer.source).read_bytes() == model.read_bytes()
    assert [s.sha256 for s in second.splits["train"].shards] == [s.sha256 for s in first.splits["train"].shards]
    copy = config_of(tmp_path, tokenizer={"source_model": str(folder / second.tokenizer.source)})
    model.rename(model.with_suffix(".away"))
    with pytest.raises(
        DataError, match=r"source\.model: no such file.* has a copy in its folder tokenizer/: give that"
    ):
        prepared_folder(taken)
    assert (prepared_folder(copy), prepare(copy)) == (folder, second)
    model.with_suffix(".away").rename(model)
    separate = config_of(tmp_path, tokenizer={"shared": False, "source_model": str(model), "target_model": str(model)})
    manifest = prepare(separate)
    assert (prepared_folder(separate) / manifest.tokenizer.target).read_bytes() == model.read_bytes()


def test_a_taken_model_that_is_missing_or_damaged_is_named(tmp_path: Path):
    write_text(tmp_path)
    with pytest.raises(DataError, match=r"gone\.model: no such file"):
        prepare(config_of(tmp_path, tokenizer={"source_model": str(tmp_path / "gone.model")}))
    (tmp_path / "bad.model").write_bytes(b"bad")
    with pytest.raises(DataError, match=r"bad\.model: not a complete sentencepiece model"):
        prepare(config_of(tmp_path, tokenizer={"source_model": str(tmp_path / "bad.model")}))


def test_ids_take_two_bytes_until_the_vocabulary_needs_four(tmp_path: Path):
    for vocabulary, expected in ((65_528, pa.uint16()), (65_536, pa.uint32())):
        table = token_table([0], [[1, 2]], [[3, 2]], (vocabulary, 8))
        write_shard(table, tmp_path, "shards/x.parquet", 8, count_tokens)
        schema = pq.read_schema(tmp_path / "shards" / "x.parquet")
        assert schema.field("source").type.value_type == expected
        assert schema.field("target").type.value_type == pa.uint16()
        assert schema.field("row_id").type == pa.int64()


def test_progress_names_the_stages_and_ends_at_the_rows_in_all(tmp_path: Path):
    write_text(tmp_path)
    seen: list[tuple[str, int, int | None]] = []
    prepare(config_of(tmp_path), progress=lambda *report: seen.append(report))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == STAGES
    last = {stage: (done, total) for stage, done, total in seen}
    assert last["train"] == last["shuffle train"] == (500, 500)
    assert last["validation"] == (100, 100)


def test_a_corpus_of_which_nothing_is_left_is_refused_with_the_rules(tmp_path: Path):
    write_text(tmp_path)
    data = {**config_of(tmp_path).data.model_dump(), "filters": {"max_tokens": 2}}
    with pytest.raises(DataError, match=r"train\.en .* all of its 500 pairs were dropped \(too_long 500\)"):
        prepare(config_of(tmp_path, data=data))
    data = {**config_of(tmp_path).data.model_dump(), "test": {"source": "train.en", "target": "train.de"}}
    rule = r"\(held_out 500\)\. .*; is it data\.validation or test\? Then data\.filters\.rules\.held_out: false\."
    with pytest.raises(DataError, match=rf"train\.en .* all of its 500 pairs were dropped {rule}"):
        prepare(config_of(tmp_path, data=data))


def test_unequal_sides_and_bad_bytes_are_refused_before_anything_is_written(tmp_path: Path):
    write_text(tmp_path)
    with (tmp_path / "validation.de").open("ab") as file:
        file.write(b"zu viel\n")
    config = config_of(tmp_path)
    with pytest.raises(DataError, match=r"validation\.en has 100 lines, but .* has 101"):
        prepare(config)
    assert not (prepared_folder(config) / "shards").exists()


def test_the_demonstration_corpus_can_be_prepared(tmp_path: Path):
    data = {"train": {"demo": "test"}, "validation": {"demo": "validation"}}
    config = config_of(tmp_path, data=data)
    manifest = prepare(config)
    assert {name: split.rows for name, split in manifest.splits.items()} == {"train": 1000, "validation": 500}


@pytest.mark.parametrize("least", [1, 10**9])
def test_large_text_at_an_address_is_told_to_be_downloaded_by_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, least: int
):
    monkeypatch.setattr(scan, "LARGE_DOWNLOAD_BYTES", least)
    write_text(tmp_path)
    data = config_of(tmp_path).data.model_dump()
    address, sizes = f"memory://{uuid4()}", []
    for name in ("train.en", "train.de"):
        fsspec.filesystem("memory").pipe(f"{address}/{name}", content := (tmp_path / name).read_bytes())
        sizes.append(len(content))
    train = {"source": f"{address}/train.en", "target": f"{address}/train.de"}
    prepare(config_of(tmp_path, data={**data, "train": train}))
    name, size = " + ".join(train.values()), sum(sizes) / 1e9
    said = f"{name}: each process downloads these {size:.3g} GB in each pass; copy them to a disk first"
    assert [record.getMessage() for record in caplog.records] == [said] * (least == 1)


@pytest.mark.parametrize("rows", [449, 450, 451])
def test_a_corpus_may_end_with_a_chunk(tmp_path: Path, rows: int):
    write_text(tmp_path, PAIRS[:rows])
    config = config_of(tmp_path)
    manifest = prepare(config)
    assert manifest.splits["train"].rows == rows
    assert sorted(read_split(prepared_folder(config), manifest, "train")) == rows_of(PAIRS[:rows])


def two_corpora(folder: Path, pairs: list[tuple[str, str]]) -> Config:
    """The training rows as `train` and, with tags and in another file, `pairs` as `news`."""
    write_text(folder)
    lines = (f"{source}\t{target}\n" for source, target in pairs)
    (folder / "news.tsv").write_text("".join(lines), encoding="utf-8")
    text = {"source": "train.en", "target": "train.de"}
    return config_of(folder, data=mixture_of(text=text, news={"path": "news.tsv", "tags": ["<2de>", "<news>"]}))


def test_each_corpus_of_a_mixture_is_shuffled_by_itself_into_shards_of_its_name(tmp_path: Path):
    config = two_corpora(tmp_path, PAIRS[:200])
    manifest = prepare(config)
    folder = prepared_folder(config)
    assert manifest.training == ("text", "news")
    assert list(manifest.splits) == ["text", "news", "validation"]
    text, news = (read_split(folder, manifest, name) for name in manifest.training)
    assert sorted(text) == rows_of(PAIRS[:NUM_TRAIN])
    assert sorted(news) == rows_of([(f"<2de> <news> {source}", target) for source, target in PAIRS[:200]])
    assert [row for row, _, _ in text if row < 200] != [row for row, _, _ in news]
    for name in manifest.training:
        assert all(Path(shard.file).name.startswith(f"{name}-0") for shard in manifest.splits[name].shards)
    check_shards(folder, manifest)


def test_one_tokenizer_knows_all_corpora_and_keeps_each_tag_in_one_piece(tmp_path: Path):
    config = two_corpora(tmp_path, [("Übung zwölf", "exercise twelve")] * 10)
    manifest = prepare(config)
    tokenizer = load_tokenizer(prepared_folder(config), manifest.tokenizer)
    plain, tagged = tokenizer.encode_source(["<2de> Übung", "<2de> <news> Übung"])
    assert tokenizer.decode_source(tagged) == "<2de> <news> Übung"
    assert len(tagged) == len(plain) + 2  # the tag, and the space before it


def test_the_order_of_the_corpora_is_part_of_the_corpus(tmp_path: Path):
    write_text(tmp_path)
    corpora = {
        "one": {"source": "train.en", "target": "train.de"},
        "two": {"source": "validation.en", "target": "validation.de"},
    }
    kept = {"filters": {"rules": {"held_out": False}}}
    there = prepare(config_of(tmp_path, data={**mixture_of(**corpora), **kept}))
    back = prepare(config_of(tmp_path, data={**mixture_of(**dict(reversed(corpora.items()))), **kept}))
    assert there.training == back.training[::-1]
    assert there.digest != back.digest


def test_a_large_corpus_is_not_read_whole_for_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scan, "TOKENIZER_CHOICE", 1)
    monkeypatch.setattr(scan, "TRAINING_SENTENCES", 240)
    write_text(tmp_path)
    read: list[int] = []
    prepare(
        config_of(tmp_path), progress=lambda stage, done, total: read.append(done) if stage == "tokenizer" else None
    )
    assert read == [0, 100, 200, 300, 400]


def test_a_flipped_bit_in_a_page_of_a_shard_is_noticed(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path)
    shard = prepared_folder(config) / prepare(config).splits["train"].shards[0].file
    content = bytearray(shard.read_bytes())
    content[pq.read_metadata(shard).row_group(0).column(1).data_page_offset + 40] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(OSError, match="CRC checksum"), pq.ParquetFile(shard, page_checksum_verification=True) as file:
        file.read_row_group(0)
