"""With data.on_the_fly `prepare` makes a light folder: parquet stays where it is, other text becomes shards of text."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_helpers import NUM_TRAIN, PAIRS, SMALL, check_shards, config_of, mixture_of, read_split, write_text

from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import Manifest, TextColumns
from dist_transformer.data.prepare import chunks, scan
from dist_transformer.data.prepare.preparation import load_tokenizer, prepare, prepared_folder
from dist_transformer.errors import DataError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in SMALL.items():
        monkeypatch.setattr(chunks, name, rows)


def write_parquet(path: Path, pairs: list[tuple[str, str]], row_group_rows: int) -> Path:
    """Nested columns, as translation corpora on the Hub have them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"translation": {"en": source, "de": target}} for source, target in pairs]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_rows)
    return path


def config_in(folder: Path, train: dict[str, Any] | None, **data: Any) -> Config:
    write_text(folder)
    return config_of(folder, data={**config_of(folder).data.model_dump(), "train": train, "on_the_fly": True, **data})


def texts_of(folder: Path, manifest: Manifest, split: str) -> list[tuple[int, str, str]]:
    shards = (pq.read_table(folder / shard.file) for shard in manifest.splits[split].shards)
    return [tuple(row.values()) for shard in shards for row in shard.to_pylist()]


def test_parquet_is_indexed_and_left_where_it_is(tmp_path: Path):
    write_parquet(tmp_path / "web" / "b.parquet", PAIRS[300:NUM_TRAIN], 90)
    write_parquet(tmp_path / "web" / "a.parquet", PAIRS[:300], 100)
    config = config_in(tmp_path, {"path": "web/*.parquet", "tags": ["<2de>", "<web>"]})
    manifest = prepare(config)
    folder = prepared_folder(config)
    split = manifest.splits["train"]
    assert split.text == TextColumns("translation.en", "translation.de", "<2de> <web> ")
    assert [shard.file for shard in split.shards] == [str(tmp_path / "web" / f"{name}.parquet") for name in "ab"]
    assert all(shard.is_in_place and shard.bytes == Path(shard.file).stat().st_size for shard in split.shards)
    assert [[group.rows for group in shard.row_groups] for shard in split.shards] == [[100, 100, 100], [90, 90, 20]]
    assert (split.rows, split.read_rows, split.dropped) == (500, 500, {})
    assert [path.name for path in (folder / "shards").iterdir()] == ["validation-00000.parquet"]
    check_shards(folder, manifest)
    assert Manifest.load(folder) == manifest
    assert len(read_split(folder, manifest, "validation")) == 100


@pytest.mark.parametrize(
    ("window_rows", "said"), [(9, "train.parquet: each window reads a row group, of up to 100 rows"), (10, "")]
)
def test_row_groups_that_are_far_larger_than_a_window_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, window_rows: int, said: str
):
    write_parquet(tmp_path / "train.parquet", PAIRS[:NUM_TRAIN], 100)
    prepare(config_in(tmp_path, {"path": "train.parquet"}, window_rows=window_rows))
    assert (said in caplog.text) if said else not caplog.records


def test_tokens_are_estimated_from_the_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_parquet(tmp_path / "all.parquet", PAIRS[:NUM_TRAIN], 100)
    counted = prepare(
        config_of(tmp_path, data=config_in(tmp_path, {"path": "all.parquet"}, on_the_fly=False).data.model_dump())
    )
    exact = counted.splits["train"]
    for sample_rows in (2000, 200):
        monkeypatch.setattr(scan, "SAMPLE_ROWS", sample_rows)
        config = config_in(tmp_path, {"path": "all.parquet"}, prepared=str(tmp_path / f"sample-{sample_rows}"))
        split = prepare(config).splits["train"]
        tolerance = 0.01 if sample_rows > NUM_TRAIN else 0.1
        assert split.source_tokens == pytest.approx(exact.source_tokens, rel=tolerance)
        assert split.target_tokens == pytest.approx(exact.target_tokens, rel=tolerance)
        assert split.source_tokens == sum(group.source_tokens for group in split.row_groups)
        assert split.max_source_tokens == config.data.filters.max_tokens >= exact.max_source_tokens


def test_other_text_becomes_shuffled_shards_of_text(tmp_path: Path):
    pairs = [(f"ﬁne {source}", target) for source, target in PAIRS[:NUM_TRAIN]]
    pairs[7] = ("", "leer")
    lines = (json.dumps({"en": source, "de": target}) + "\n" for source, target in pairs)
    (tmp_path / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    config = config_in(tmp_path, {"path": "train.jsonl", "tags": ["<2de>"]}, normalization="NFKC")
    manifest = prepare(config)
    split = manifest.splits["train"]
    assert split.text == TextColumns("source", "target", "")
    assert split.dropped == {"empty": 1}
    assert (split.read_rows, split.rows, len(split.shards)) == (500, 499, 3)
    rows = texts_of(prepared_folder(config), manifest, "train")
    expected = [(number, f"<2de> {source.replace('ﬁ', 'fi')}", target) for number, (source, target) in enumerate(pairs)]
    assert sorted(rows) == [row for row in expected if row[0] != 7]
    assert [row for row, _, _ in rows] != sorted(row for row, _, _ in rows)
    schema = pq.read_schema(prepared_folder(config) / split.shards[0].file)
    assert schema.names == ["row_id", "source", "target"]
    assert all(group.rows <= 32 for group in split.row_groups)


def test_the_order_of_shuffled_text_depends_on_the_seed_alone(tmp_path: Path):
    orders = []
    for seed, name in ((3, "a"), (3, "b"), (4, "c")):
        config = config_in(tmp_path, {"source": "train.en", "target": "train.de"}, prepared=str(tmp_path / name))
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        orders.append([row for row, _, _ in texts_of(tmp_path / name, prepare(config), "train")])
    assert orders[0] == orders[1] != orders[2]


def test_a_mixture_may_have_both_and_the_report_tells_them_apart(tmp_path: Path):
    write_parquet(tmp_path / "web.parquet", PAIRS[:200], 100)
    corpora = {"web": {"path": "web.parquet"}, "text": {"source": "train.en", "target": "train.de"}}
    config = config_in(tmp_path, **mixture_of(**corpora))
    manifest = prepare(config)
    assert [manifest.splits[name].shards[0].is_in_place for name in manifest.training] == [True, False]
    text = (prepared_folder(config) / "report.md").read_text()
    assert "web: tokenized on the fly, so tokens and lengths are estimated from its first 200 pairs" in text


def test_another_file_in_place_is_another_corpus(tmp_path: Path):
    digests = []
    for pairs in (PAIRS[:300], PAIRS[:300], PAIRS[1:301]):
        write_parquet(tmp_path / "web.parquet", pairs, 100)
        config = config_in(tmp_path, {"path": "web.parquet"}, prepared=str(tmp_path / f"prepared-{len(digests)}"))
        digests.append(prepare(config).digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_corpus_whose_head_is_dropped_is_sampled_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scan, "SAMPLE_ROWS", 50)
    write_parquet(tmp_path / "web.parquet", [("bad", "")] * 120 + PAIRS[:180], 100)
    config = config_in(tmp_path, {"path": "web.parquet"})
    split = prepare(config).splits["train"]
    assert split.rows == 300
    assert 0 < split.source_tokens < sum(len(source) for source, _ in PAIRS[:180])
    assert "estimated from its first 150 pairs" in (prepared_folder(config) / "report.md").read_text()


def test_a_corpus_whose_pairs_are_all_dropped_is_refused(tmp_path: Path):
    write_parquet(tmp_path / "web.parquet", PAIRS[:300], 100)
    config = config_in(tmp_path, {"path": "web.parquet"}, filters={"max_tokens": 2})
    with pytest.raises(DataError, match=r"web\.parquet: all of its 300 pairs were dropped \(too_long 300\)"):
        prepare(config)


def test_a_tokenizer_knows_the_pieces_of_modified_text(tmp_path: Path):
    text, upper = {"source": "train.en", "target": "train.de"}, {"upper_case": 0.5}
    lengths, folders = [], []
    for number, modifiers in enumerate(({}, upper, upper)):
        config = config_in(tmp_path, text, modifiers=modifiers, prepared=str(tmp_path / str(number)))
        tokenizer = load_tokenizer(tmp_path / str(number), prepare(config).tokenizer)
        lengths.append(sum(map(len, tokenizer.encode_source([source.upper() for source, _ in PAIRS[:100]]))))
        folders.append(tmp_path / str(number))
    assert lengths[1] < 0.75 * lengths[0]  # not a piece for each letter
    models = [(folder / "tokenizer" / "source.model").read_bytes() for folder in folders]
    assert models[0] != models[1] == models[2]


def test_modifiers_may_be_of_another_share_than_the_tokenizers_only_if_this_had_none(tmp_path: Path):
    """So a run of the version before, whose tokenizer learned from the text as it is, goes on."""
    text = {"source": "train.en", "target": "train.de"}
    plain, upper = str(tmp_path / "plain"), str(tmp_path / "upper")
    manifest = prepare(config_in(tmp_path, text, prepared=plain))
    assert prepare(config_in(tmp_path, text, modifiers={"upper_case": 0.5}, prepared=plain)) == manifest
    prepare(config_in(tmp_path, text, modifiers={"upper_case": 0.5}, prepared=upper))
    with pytest.raises(DataError, match=r"tokenizer\.modifiers\.upper_case: 0\.5 in the folder, 0\.1 now"):
        prepare(config_in(tmp_path, text, modifiers={"upper_case": 0.1, "typos": 0.0}, prepared=upper))
