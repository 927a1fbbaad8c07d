"""Cleaning in `prepare`: what is dropped over whole corpora, by which threshold, with which examples."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_helpers import (
    NUM_TRAIN,
    PAIRS,
    SMALL,
    TEXT,
    config_in,
    config_of,
    mixture_of,
    report_of,
    rows_in,
    write_text,
    write_tsv,
)

from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.config.schema import Config
from dist_transformer.data.filters import KeptText
from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.loader.window_request import RowSlice, WindowKey, WindowRequest
from dist_transformer.data.prepare import chunks, clean, duplicates
from dist_transformer.data.prepare.claims import Work
from dist_transformer.data.prepare.duplicates import Comparison, batch_keys, load_repeated, save_keys
from dist_transformer.data.prepare.preparation import prepare, prepared_folder
from dist_transformer.data.recipe import make_recipe
from dist_transformer.errors import DataError

Pair = tuple[str, str]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in SMALL.items():
        monkeypatch.setattr(chunks, name, rows)
        if name in ("BATCH_ROWS", "CHUNK_ROWS"):
            monkeypatch.setattr(clean, name, rows)


def test_a_corpus_that_repeats_another_one_is_named(tmp_path: Path):
    config = config_in(tmp_path, PAIRS[:40], {"duplicates": True}, **mixture_of(news=TEXT, again=TEXT))
    said = r"^again: .*train\.de: all of its 40 pairs were dropped \(duplicates 40\)\. .* another corpus has the same text\.$"
    with pytest.raises(DataError, match=said):
        prepare(config)


def test_the_first_of_equal_pairs_stays_in_the_order_of_the_corpora(tmp_path: Path):
    again = [(source.upper(), f"{target} !") for source, target in PAIRS[:40]]
    write_tsv(
        tmp_path / "more.tsv", [*PAIRS[450:500], ("Only here", "Nur hier"), ("only here", "nur hier"), *PAIRS[300:310]]
    )
    corpora = mixture_of(text=TEXT, more={"path": "more.tsv", "tags": ["<2de>"]})
    config = config_in(tmp_path, [*PAIRS[:400], *again], {"duplicates": True}, **corpora)
    assert rows_in(config, "text") == [*range(400)]
    assert rows_in(config, "more") == [*range(51)]
    report = report_of(config)
    assert report["text"]["dropped"]["duplicates"] == 40
    assert report["text"]["examples"]["duplicates"] == [[*pair] for pair in again[:3]]
    assert report["more"]["dropped"]["duplicates"] == 11
    text = (prepared_folder(config) / "report.md").read_text(encoding="utf-8")
    assert f"- text, dropped by duplicates: {json.dumps(again[0][0])} | " in text


def test_so_many_copies_as_allowed_stay(tmp_path: Path):
    assert rows_in(config_in(tmp_path, PAIRS[:60] * 5, {"duplicates": 3})) == [*range(180)]


def test_a_corpus_without_the_rule_neither_loses_pairs_nor_takes_them_from_others(tmp_path: Path):
    write_tsv(tmp_path / "more.tsv", PAIRS[:100])
    upsampled = {**TEXT, "filters": {"rules": {"duplicates": False}}}
    config = config_in(
        tmp_path, PAIRS[:100] * 2, {"duplicates": True}, **mixture_of(text=upsampled, more={"path": "more.tsv"})
    )
    report = report_of(config)
    assert [report[name]["rows"] for name in ("text", "more")] == [200, 100]


def with_typo(pair: Pair, number: int) -> Pair:
    place = 5 + number % 10
    return pair[0][:place] + "q" + pair[0][place:], pair[1]


def test_near_duplicates_are_dropped_and_pairs_that_only_share_a_side_are_not(tmp_path: Path):
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    draw = random.Random(1)
    words = ["".join(draw.choices(alphabet, k=draw.randint(3, 9))) for _ in range(3000)]
    pairs = [tuple(" ".join(draw.choices(words, k=12)) for _ in range(2)) for _ in range(300)]
    near = [with_typo(pair, number) for number, pair in enumerate(pairs[:100])]
    other_target = [(source, pairs[number - 1][1]) for number, (source, _) in enumerate(pairs[100:150], start=100)]
    rows = rows_in(config_in(tmp_path, [*pairs, *near, *other_target], {"near_duplicates": 0.8}))
    assert [row for row in rows if row < 300] == [*range(300)]
    assert len([row for row in rows if 300 <= row < 400]) <= 2
    assert [row for row in rows if row >= 400] == [*range(400, 450)]


def as_the_version_before(path: Path) -> None:
    """Keys in the order of the pairs, without what is sorted."""
    names = [path.with_name(f"{path.name}.{name}.npy") for name in ("keys.sorted", "keys", "bands.sorted")]
    keys, order = np.load(names[0])[:, 0]
    np.save(names[1], keys[np.argsort(order)])
    names[0].unlink()
    names[2].unlink()


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "is_old"), [(40, False), (40, True), (1 << 24, False)])
def test_partitions_of_the_keys_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: int, is_old: bool
):
    monkeypatch.setattr(duplicates, "PARTITION_HASHES", partition)
    monkeypatch.setattr(duplicates, "CANDIDATES", partition)
    draw = np.random.default_rng(3)
    keys = draw.integers(0, 40, 200).astype(np.uint64) << np.uint64(58)
    signatures = draw.integers(0, 2, (8, 64)).astype(np.uint8)[draw.integers(0, 8, 200)]
    paths = [tmp_path / str(number) for number in range(4)]
    for number, path in enumerate(paths):
        part = slice(number * 50, number * 50 + 50)
        empty = KeptText(np.arange(0), [], [], {}, 0, keys[:0], np.empty((0, 0), np.uint8))
        held = KeptText(np.arange(50), [], [], {}, 0, keys[part], signatures[part])
        save_keys(path, [batch_keys(empty, 0), batch_keys(held, number * 100)])
        if is_old:
            as_the_version_before(path)
    rules = {"duplicates": 1.0, "near_duplicates": 1.0}
    comparison = Comparison([(paths[:3], rules), (paths[3:], rules)], lambda: None)
    for part in reversed(range(comparison.num_parts)):
        comparison.find(part)
    comparison.mark()
    found = {rule: [load_repeated(path, [rule])[rule].tolist() for path in paths] for rule in rules}
    expected: dict[str, list[list[int]]] = {rule: [[], [], [], []] for rule in rules}
    for place in range(200):
        row = place % 50 + place // 50 * 100
        if keys[place] in keys[:place]:
            expected["duplicates"][place // 50].append(row)
        elif signatures[place].tolist() in signatures[:place].tolist():
            expected["near_duplicates"][place // 50].append(row)
    assert found == expected


def test_killed_before_the_keys_are_compared_and_after_it_resumes_to_the_same_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folders = [tmp_path / name for name in "ab"]
    configs = [config_in(folder, PAIRS[:300] + PAIRS[:100], {"duplicates": True}) for folder in folders]
    finish, made = Work.finish, list[str]()
    stops = ["train-chunk-00001", "repeated", "+repeated-4-range-00002", "train+keys-chunk-00001"]
    monkeypatch.setattr(duplicates, "PARTITION_HASHES", 100)

    def finish_until(work: Work, unit: str, result: Any) -> None:
        if unit == stops[-1]:
            raise KeyboardInterrupt
        made.append(unit)
        finish(work, unit, result)

    monkeypatch.setattr(Work, "finish", finish_until)
    while stops:
        with pytest.raises(KeyboardInterrupt):
            prepare(configs[0])
        stops.pop()
    monkeypatch.setattr(Work, "finish", finish)
    assert prepare(configs[0]).digest == prepare(configs[1]).digest
    assert len(made) == len({*made})


def test_a_stop_request_is_taken_while_the_keys_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(duplicates, "PARTITION_HASHES", 100)
    config = config_in(tmp_path, PAIRS[:300] + PAIRS[:100], {"duplicates": True})
    stages: list[str] = []

    def stop_in_the_third_part(stage: str, done: int, total: int | None) -> None:
        stages.append(stage)
        if stages.count("repeated") == 2 * 3 + 1:  # of each part three files are read
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config, progress=stop_in_the_third_part)
    done = sorted(path.name for path in (prepared_folder(config) / "work").glob("*repeated*"))
    assert done == ["+repeated-4-range-00000.json", "+repeated-4-range-00001.json"]
    assert rows_in(config) == [*range(300)]


@pytest.mark.slow
def test_validation_and_test_sentences_are_removed_unless_told_otherwise(tmp_path: Path):
    write_text(
        tmp_path,
        [
            *(*PAIRS[:300], *PAIRS[NUM_TRAIN : NUM_TRAIN + 20], (PAIRS[590][0], "etwas"), ("x", PAIRS[310][1])),
            *((target, source) for source, target in PAIRS[305:309]),  # as of a corpus of the other direction
        ],
    )
    write_tsv(tmp_path / "test.tsv", PAIRS[300:320])
    write_tsv(tmp_path / "more.tsv", PAIRS[:10])
    data = config_of(tmp_path).data.model_dump()
    held_out = {"test": {"path": "test.tsv", "tags": ["<t>"]}, "more_validation": {"more": {"path": "more.tsv"}}}
    config = config_of(tmp_path, data={**data, **held_out})
    assert rows_in(config) == [*range(10, 300)]
    assert report_of(config)["train"]["dropped"]["held_out"] == 36
    off = config_of(tmp_path, data={**data, **held_out, "filters": {"rules": {"held_out": False}}})
    assert rows_in(off) == [*range(326)]
    longer = config_of(tmp_path, data={**data, "filters": {"rules": {"held_out": 1000}}})
    assert rows_in(longer) == [*range(326)]
    other_test = config_of(tmp_path, data={**data, **held_out, "test": {"path": "more.tsv"}})
    assert prepared_folder(other_test) != prepared_folder(config) != prepared_folder(off)


def test_held_out_sentences_with_markup_are_removed_before_and_after_their_repair(tmp_path: Path):
    marked = [(f"<i>{source}</i> &amp;", f"{target} &lt;") for source, target in PAIRS[300:310]]
    plain = [(f"{source} &", f"{target} <") for source, target in PAIRS[300:310]]
    write_tsv(tmp_path / "test.tsv", marked)
    for rule, rows in ((True, 50), (False, 60)):
        rules = {"markup": rule and 0.9, "held_out": True}
        config = config_in(tmp_path, [*PAIRS[:50], *marked, *plain], rules, test={"path": "test.tsv"})
        assert len(rows_in(config)) == rows


def test_a_test_set_that_cannot_be_read_stops_the_preparation_unless_it_may_be_in_training(tmp_path: Path):
    write_text(tmp_path)
    (tmp_path / "test.tsv").write_text("only one column\n")
    data = {**config_of(tmp_path).data.model_dump(), "test": {"path": "test.tsv"}}
    with pytest.raises(DataError, match=r"data\.test: its sentences cannot be kept out .*test\.tsv.*held_out: false"):
        prepare(config_of(tmp_path, data=data))
    prepare(config_of(tmp_path, data={**data, "filters": {"rules": {"held_out": False}}}))


def test_thresholds_are_those_of_the_corpus(tmp_path: Path):
    words = [pair for pair in PAIRS if not any(map(str.isdigit, pair[0] + pair[1]))]
    numbers = [("no 1234 here", "hier keine"), ("and 99 none", "und keine")]
    write_tsv(tmp_path / "a.tsv", [*words[:50], *numbers])
    write_tsv(tmp_path / "b.tsv", [*words[50:100], *numbers])
    write_tsv(tmp_path / "c.tsv", [*words[100:150], *numbers])
    own = {"a": {}, "b": {"rules": {"numbers": 2}}, "c": {"rules": {"numbers": False}, "max_length_ratio": 1.01}}
    corpora = {name: {"path": f"{name}.tsv", "filters": filters} for name, filters in own.items()}
    report = report_of(config_in(tmp_path, PAIRS[:9], {"numbers": True}, **mixture_of(**corpora)))
    assert [report[name]["dropped"].get("numbers") for name in "abc"] == [1, 2, None]
    assert report["c"]["dropped"]["length_ratio"] > 25 > report["a"]["dropped"]["length_ratio"] == 0


# --------------------------------------------------------------------------------------------------- on the fly


def test_on_the_fly_the_rules_hold_for_text_and_for_parquet_in_place(tmp_path: Path):
    noisy = [
        *PAIRS[:50],
        ("a &amp; b &amp; c and so on", "a &amp; b &amp; c und so weiter"),
        PAIRS[550],
        ("=== 1 ===", "== 1 =="),
    ]
    rows = [{"en": source, "de": target} for source, target in noisy]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "web.parquet")
    corpora = mixture_of(web={"path": "web.parquet", "tags": ["<b>"]}, text={**TEXT, "tags": ["<b>"]})
    rules = {"markup": 0.5, "letters": 0.3, "held_out": True}
    config = config_in(tmp_path, noisy, rules, **corpora, on_the_fly=True)
    manifest = prepare(config)
    folder = prepared_folder(config)
    assert [manifest.splits[name].shards[0].is_in_place for name in manifest.training] == [True, False]
    assert manifest.splits["text"].dropped == {"held_out": 1, "letters": 1}
    reader = RowReader(folder, manifest, config.data, 0.0, 1)
    read = []
    for corpus, split in enumerate(manifest.training):
        slices = tuple(RowSlice(corpus, n, 0, each.rows) for n, each in enumerate(manifest.splits[split].row_groups))
        read.append(reader.read(WindowRequest(WindowKey(0, 0, 0, 0), slices)))
    assert read[0].dropped == {"held_out": 1, "letters": 1}
    assert read[1].dropped == {}
    assert [len(each.row_ids) for each in read] == [51, 51]
    assert sorted(read[0].source.ids.tolist()) == sorted(read[1].source.ids.tolist())


@pytest.mark.parametrize("cut", [None, 300, 0])
def test_held_out_sentences_that_are_gone_or_cut_stop_reading_in_place(tmp_path: Path, cut: int | None):
    rows = [{"en": source, "de": target} for source, target in PAIRS[:50]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "web.parquet")
    corpora = mixture_of(web={"path": "web.parquet"}, text=TEXT)
    config = config_in(tmp_path, PAIRS[:50], {"held_out": True}, **corpora, on_the_fly=True)
    manifest, folder = prepare(config), prepared_folder(config)
    file = folder / "held_out.npz"
    content = file.read_bytes()
    file.unlink()
    if cut is not None:
        file.write_bytes(content[:cut])
    with pytest.raises(
        DataError, match=rf"held_out\.npz: cannot be read .* trained on\. .*delete {folder} and prepare"
    ):
        RowReader(folder, manifest, config.data, 0.0, 1)
    file.unlink(missing_ok=True)
    before = {key: value for key, value in manifest.recipe.items() if key != "held_out"}  # as of the version before
    RowReader(folder, replace(manifest, recipe=before), config.data, 0.0, 1)


@pytest.mark.parametrize("rules", [{"duplicates": True}, {"near_duplicates": True}])
def test_rules_about_all_pairs_are_refused_for_parquet_in_place(tmp_path: Path, rules: dict[str, bool]):
    rows = [{"en": source, "de": target} for source, target in PAIRS[:50]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "web.parquet")
    config = config_in(tmp_path, PAIRS[:9], rules, train={"path": "web.parquet"}, on_the_fly=True)
    with pytest.raises(DataError, match=f"web.parquet: is read in place .* {next(iter(rules))} cannot be applied: set"):
        prepare(config)


@pytest.mark.slow
def test_a_corpus_with_its_sides_exchanged_is_judged_by_its_own_languages(tmp_path: Path):
    write_text(tmp_path)
    back = {"source": "train.de", "target": "train.en", "tags": ["<2en>"]}

    def config(**corpora: dict[str, Any]) -> Config:
        data = {**mixture_of(**corpora), "filters": {"rules": {"language": True, "held_out": False}}}
        return config_of(tmp_path, data=data)

    both = report_of(config(on=TEXT, back={**back, "languages": ["de", "en"]}))
    assert both["back"]["dropped"] == both["on"]["dropped"]
    assert report_of(config(on=TEXT, back=back))["back"]["dropped"]["language"] > 100  # as those of `data`
    same = config(on={**TEXT, "languages": ["en", "de"]}, back=back)
    assert make_recipe(same) == make_recipe(config(on=TEXT, back=back))


def test_the_columns_of_a_table_are_the_languages_of_its_corpus(tmp_path: Path):
    write_text(tmp_path)
    pq.write_table(pa.table({"de": [de for _, de in PAIRS], "en": [en for en, _ in PAIRS]}), tmp_path / "both.parquet")
    data = {"train": {"path": "both.parquet", "languages": ["de", "en"]}}
    clean.clean(config_of(tmp_path, data=data), tmp_path / "out", lambda *_: None)
    assert {path.name for path in (tmp_path / "out").glob("train.??")} == {"train.de", "train.en"}
    kept = [(tmp_path / "out" / f"train.{side}").read_text("utf-8").splitlines()[0] for side in ("de", "en")]
    assert (kept[1], kept[0]) in PAIRS


def test_a_configuration_with_filters_of_corpora_is_kept_as_it_was_given(tmp_path: Path):
    own = {**TEXT, "filters": {"rules": {"language": 40, "numbers": True}, "max_tokens": 50}}
    config = config_in(tmp_path, PAIRS[:9], {"letters": 0.25}, train=own)
    (tmp_path / "kept.yaml").write_text(to_yaml(config), encoding="utf-8")
    again = load_config(tmp_path / "kept.yaml")
    assert again == config
    filters = again.data.filters_of(again.data.training_corpora()["train"])
    assert (filters.max_tokens, filters.thresholds()) == (50, {"letters": 0.25, "language": 40, "numbers": 3})
