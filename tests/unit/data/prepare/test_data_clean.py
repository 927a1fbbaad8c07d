"""`data clean`: what is kept and what is dropped, with reasons, and nothing of anybody else is touched."""

import errno
import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest
from prepare_helpers import PAIRS, SMALL, TEXT, config_in, rows_in
from stuttering_disk import stuttering
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.config.loading import to_yaml
from dist_transformer.config.schema import Config
from dist_transformer.data.prepare import chunks, clean
from dist_transformer.errors import MachineError, UserError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in SMALL.items():
        monkeypatch.setattr(chunks, name, rows)
        if name in ("BATCH_ROWS", "CHUNK_ROWS"):
            monkeypatch.setattr(clean, name, rows)


def run_clean(config: Config, folder: Path, *arguments: str) -> str:
    (folder / "my.yaml").write_text(to_yaml(config), encoding="utf-8")
    result = CliRunner().invoke(app, ["data", "clean", str(folder / "my.yaml"), *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_data_clean_writes_what_is_kept_and_what_is_dropped_with_reasons(tmp_path: Path):
    train = [
        *PAIRS[:200],
        ("Fish &amp; chips, please, twice", "Zweimal Fisch mit Pommes\tbitte"),
        *PAIRS[:5],
        ("", "leer"),
        PAIRS[510],
    ]
    rules = {"markup": True, "duplicates": True, "held_out": True}
    config = config_in(tmp_path, train, rules, train={**TEXT, "tags": ["<2de>"]})
    output = run_clean(config, tmp_path, str(tmp_path / "out"))
    assert "train: kept 201 of 208 pairs; dropped: " in output
    kept = [
        (tmp_path / "out" / f"train.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de")
    ]
    assert list(zip(*kept, strict=True))[:200] == PAIRS[:200]
    assert kept[0][200:] == ["Fish & chips, please, twice"]
    dropped = [
        line.split("\t") for line in (tmp_path / "out" / "train.dropped.tsv").read_text(encoding="utf-8").splitlines()
    ]
    assert dropped == [
        *(["duplicates", str(202 + n), *PAIRS[n]] for n in range(5)),
        ["empty", "207", "", "leer"],
        ["held_out", "208", *PAIRS[510]],
    ]
    counts = {"pairs": 208, "kept": 201, "repaired": 1, "dropped": {"duplicates": 5, "empty": 1, "held_out": 1}}
    assert json.loads((tmp_path / "out" / "clean.json").read_text()) == {"corpora": {"train": counts}}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "clean.json",
        "train.de",
        "train.dropped.tsv",
        "train.en",
    ]
    assert (
        run_clean(config, tmp_path, str(tmp_path / "out"), "data.filters.rules.duplicates=false").count("duplicates")
        == 0
    )
    assert len((tmp_path / "out" / "train.en").read_text().splitlines()) == 206
    prepared = rows_in(config_in(tmp_path, train, rules))
    assert prepared == [*range(201)]


def test_data_clean_writes_over_nothing_that_is_not_ours_and_begins_anew_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_in(tmp_path, PAIRS[:50], {})
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"out: is there already \(a folder with thesis.txt\)"):
        clean.clean(config, out, lambda *_: None)
    (out / "thesis.txt").unlink()
    (out / ".clean").mkdir()  # of a process that was killed before it wrote its label
    with monkeypatch.context() as patch:
        patch.setattr(clean, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            clean.clean(config, out, lambda *_: None)
    assert not (out / "clean.json").exists()
    clean.clean(config, out, lambda *_: None)
    assert len((out / "train.en").read_text().splitlines()) == 50
    assert not (out / ".clean").exists()
    with stuttering(errno.EIO, {clean.REPORT_NAME}), pytest.raises(MachineError, match="Input/output error"):
        clean.clean(config, out, lambda *_: None)


def test_data_clean_is_refused_where_another_process_cleans_and_changes_nothing_there(tmp_path: Path):
    config, out, said = config_in(tmp_path, PAIRS[:50], {}), tmp_path / "out", list[str]()
    (tmp_path / "my.yaml").write_text(to_yaml(config), encoding="utf-8")

    def start_another(*_: object) -> None:
        if not said:
            before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
            command = [sys.executable, "-m", "dist_transformer", "data", "clean", "my.yaml", "out"]
            ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
            assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
            said.append(f"{ended.returncode} {ended.stderr}")

    clean.clean(config, out, start_another)
    assert said == [
        "2 dist-transformer: out: another process cleans into it; wait until it ends, or give another path\n"
    ]
    assert sorted(path.name for path in out.iterdir()) == ["clean.json", "train.de", "train.dropped.tsv", "train.en"]
    assert len((out / "train.en").read_text().splitlines()) == 50


def test_data_clean_needs_no_locks_of_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    out = tmp_path / "out"
    clean.clean(config_in(tmp_path, PAIRS[:50], {}), out, lambda *_: None)
    assert sorted(path.name for path in out.iterdir()) == ["clean.json", "train.de", "train.dropped.tsv", "train.en"]


def test_data_clean_names_the_sides_where_both_languages_are_the_same(tmp_path: Path):
    config = config_in(tmp_path, PAIRS[:50], {}, source_language="en", target_language="en")
    clean.clean(config, tmp_path / "out", lambda *_: None)
    sides = [(tmp_path / "out" / f"train.{side}").read_text("utf-8").splitlines() for side in ("source", "target")]
    assert list(zip(*sides, strict=True)) == PAIRS[:50]


@pytest.mark.parametrize("has_report", [False, True])
def test_data_clean_leaves_a_folder_named_clean_that_is_not_ours(tmp_path: Path, has_report: bool):
    config, out = config_in(tmp_path, PAIRS[:50], {}), tmp_path / "out"
    if has_report:
        clean.clean(config, out, lambda *_: None)
    (out / ".clean").mkdir(parents=True)
    (out / ".clean" / "cache").write_text("mine")
    (out / "train.en").write_text("mine")
    with pytest.raises(UserError, match=r"out: is there already \(a folder with .clean"):
        clean.clean(config, out, lambda *_: None)
    assert [(out / name).read_text() for name in ("train.en", ".clean/cache")] == ["mine", "mine"]
