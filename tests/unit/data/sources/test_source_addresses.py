"""Text at addresses gives the rows of text on the disk; what goes wrong on the way is said with the address."""

import gzip
import hashlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from source_helpers import pack
from web_server import WebServer, web_server

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.data.sources import retries
from dist_transformer.data.sources.corpus import parquet_index, read_corpus, scan_corpus
from dist_transformer.data.sources.files import COMPRESSIONS, corpus_fingerprint, is_text_at_hand
from dist_transformer.data.sources.remote import open_parquet
from dist_transformer.errors import DataError, MachineError

PAIRS = [(f"Satz {n} äöü", f"sentence {n}") for n in range(300)]


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    with web_server(tmp_path) as server:
        yield server


@pytest.fixture
def memory() -> Iterator[str]:
    folder = f"memory://{uuid4()}"
    yield folder
    fsspec.filesystem("memory").rm(folder, recursive=True)


@pytest.fixture(autouse=True)
def two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 2)


@pytest.fixture
def one_attempt(two_attempts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)


def data_at(root: str, corpus: CorpusConfig, **settings: object) -> DataConfig:
    given = {"root": root, "train": corpus, "source_language": "de", "target_language": "en", **settings}
    return DataConfig.model_validate(given)


def read(root: str, corpus: CorpusConfig, **settings: object) -> list[tuple[str | None, str | None]]:
    batches = read_corpus(corpus, data_at(root, corpus, **settings), 64)
    return [pair for batch in batches for pair in zip(batch.source, batch.target, strict=True)]


def write_corpora(root: str) -> list[CorpusConfig]:
    """The same pairs in every format."""
    lines = {
        "a.de": "".join(f"{source}\n" for source, _ in PAIRS),
        "a.en": "".join(f"{target}\n" for _, target in PAIRS),
        "a.tsv": "".join(f"{source}\t{target}\n" for source, target in PAIRS),
        "a.csv": "de,en\n" + "".join(f"{source},{target}\n" for source, target in PAIRS),
        "a.jsonl": "".join(f'{{"de": "{source}", "en": "{target}"}}\n' for source, target in PAIRS),
    }
    table = pa.table({"de": [source for source, _ in PAIRS], "en": [target for _, target in PAIRS]})
    for name, text in lines.items():
        for suffix in ("", *COMPRESSIONS):
            write(root, name + suffix, pack(text, suffix))
    with fsspec.open(f"{root}/a.parquet", "wb") as file:
        pq.write_table(table, file, row_group_size=64)
    with fsspec.open(f"{root}/stream.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, 64)
    with fsspec.open(f"{root}/file.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table, 64)
    suffixes = ("", *COMPRESSIONS)
    tables = [f"a.{kind}{suffix}" for kind in ("tsv", "csv", "jsonl") for suffix in suffixes]
    aligned = [CorpusConfig(source=f"a.de{suffix}", target=f"a.en{suffix}") for suffix in suffixes]
    return aligned + [CorpusConfig(path=name) for name in (*tables, "a.parquet", "stream.arrow", "file.arrow")]


def write(root: str, name: str, content: bytes) -> None:
    with fsspec.open(f"{root}/{name}", "wb") as file:
        file.write(content)


# ------------------------------------------------------------------------------------------------------------ rows


def test_every_format_at_an_address_gives_the_rows_of_the_disk(tmp_path: Path, web: WebServer, memory: str):
    for root in (str(tmp_path), memory):
        corpora = write_corpora(root)
    for corpus in corpora:
        for root in (str(tmp_path), f"file://{tmp_path}", memory, web.address):
            assert read(root, corpus) == PAIRS, (root, corpus)


@pytest.mark.slow
def test_a_server_that_sends_whole_files_only_will_do_for_lines_and_streams(tmp_path: Path):
    corpora = write_corpora(str(tmp_path))
    noise = np.random.default_rng(0)
    big = "".join(f"{noise.bytes(40).hex()}\t{n}\n" for n in range(80_000))
    (tmp_path / "big.tsv").write_text(big)  # more than a block that a filesystem reads ahead
    with web_server(tmp_path, ranges=False) as server:
        for corpus in corpora:
            if corpus.path not in ("a.parquet", "file.arrow"):
                assert read(server.address, corpus) == PAIRS
        assert len(read(server.address, CorpusConfig(path="big.tsv"))) == 80_000
        (tmp_path / "big.parquet").write_bytes(bytes(6_000_000))
        with pytest.raises(DataError, match=r"big\.parquet: this server sends whole files only.* Download it"):
            read(server.address, CorpusConfig(path="big.parquet"))


def test_a_query_is_no_part_of_the_name(tmp_path: Path, web: WebServer):
    write_corpora(str(tmp_path))
    assert read(web.address, CorpusConfig(path="a.tsv.gz?download=1")) == PAIRS


def test_patterns_at_an_address_are_read_in_the_order_of_their_names(tmp_path: Path, web: WebServer, memory: str):
    for root in (str(tmp_path), memory):
        for number in (2, 1, 3):
            write(root, f"part-{number}.tsv", f"s{number}\tt{number}\n".encode())
            write(root, f"side-{number}.de", f"s{number}\n".encode())
            write(root, f"side-{number}.en", f"t{number}\n".encode())
        write(root, "part.txt", b"no table\n")
    expected = [("s1", "t1"), ("s2", "t2"), ("s3", "t3")]
    aligned = CorpusConfig(source="side-*.de", target="side-*.en")
    for root in (str(tmp_path), memory, web.address):
        for corpus in (CorpusConfig(path="part-*.tsv"), CorpusConfig(path="part-[123].tsv"), aligned):
            assert read(root, corpus) == expected, root
        with pytest.raises(DataError, match=r"none-\*\.tsv: no file fits this pattern"):
            read(root, CorpusConfig(path="none-*.tsv"))
        with pytest.raises(DataError, match="3 files fit the source, but 1 the target; file n of one side"):
            read(root, CorpusConfig(source="side-*.de", target="side-1*.en"))


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_members_of_archives_are_read_as_files_are(tmp_path: Path, web: WebServer, kind: str):
    (tmp_path / "texts").mkdir()
    corpora = write_corpora(str(tmp_path / "texts"))
    shutil.make_archive(str(tmp_path / "a"), kind, tmp_path, "texts")
    archives = [
        f"{place}a.{kind}" for place in ("", f"file://{tmp_path}/", f"{web.address}/", f"simplecache::{web.address}/")
    ]

    def within(archive: str, given: CorpusConfig) -> CorpusConfig:
        names = given.model_dump(include={"source", "target", "path"}, exclude_none=True)
        return CorpusConfig(**{key: f"{kind}://texts/{name}::{archive}" for key, name in names.items()})

    for given in corpora:
        plain = corpus_fingerprint(given, data_at(str(tmp_path / "texts"), given))
        for corpus in (within(archive, given) for archive in archives):
            assert read(str(tmp_path), corpus) == PAIRS, corpus
            assert corpus_fingerprint(corpus, data_at(str(tmp_path), corpus)) == plain
    for archive in archives:
        assert read(str(tmp_path), within(archive, CorpusConfig(source="*.de", target="*.en"))) == PAIRS


def test_a_pattern_of_files_that_are_copied_first_is_one_too(tmp_path: Path, web: WebServer, memory: str):
    for root in (str(tmp_path), memory):
        for name in ("b.tsv", "a.tsv"):
            write(root, name, f"{name}\tt\n".encode())
    for root in (f"file://{tmp_path}", memory, web.address):
        assert read(".", CorpusConfig(path=f"simplecache::{root}/*.tsv")) == [("a.tsv", "t"), ("b.tsv", "t")]


def test_unwanted_row_groups_are_not_asked_for(tmp_path: Path, web: WebServer):
    noise = np.random.default_rng(0)
    texts = [noise.bytes(500).hex() for _ in range(2000)]
    pq.write_table(pa.table({"de": texts, "en": texts, "other": texts}), tmp_path / "a.parquet", row_group_size=100)
    corpus = CorpusConfig(path="a.parquet")
    data = data_at(web.address, corpus)
    batches = list(read_corpus(corpus, data, 100, lambda first_row: first_row == 1500))
    assert [(batch.first_row, batch.source) for batch in batches] == [(1500, texts[1500:1600])]
    assert web.bytes_sent < (tmp_path / "a.parquet").stat().st_size / 5


# ----------------------------------------------------------------------------------------- fingerprints and footers


def test_a_fingerprint_is_the_same_wherever_a_file_lies(tmp_path: Path, web: WebServer, memory: str):
    content = np.random.default_rng(0).bytes(5 << 20)
    for root in (str(tmp_path), memory):
        write(root, "a.tsv", content)
        write(root, "b.tsv", b"short")
    corpus = CorpusConfig(path="*.tsv")
    prints = [corpus_fingerprint(corpus, data_at(root, corpus)) for root in (str(tmp_path), memory, web.address)]
    assert prints[0] == prints[1] == prints[2]
    assert [file["name"] for file in prints[0]["files"]] == ["a.tsv", "b.tsv"]
    assert web.bytes_sent < 4 << 20
    write(str(tmp_path), "a.tsv", content[:-1] + b"x")
    assert corpus_fingerprint(corpus, data_at(str(tmp_path), corpus)) != prints[0]


def test_without_parts_of_files_a_fingerprint_is_the_version_that_the_server_tells(tmp_path: Path):
    corpus, prints = CorpusConfig(path="a.tsv"), []
    with web_server(tmp_path, ranges=False) as server:
        for text in ("x", "x", "y"):
            (tmp_path / "a.tsv").write_text(text * (6 << 20))
            prints.append(corpus_fingerprint(corpus, data_at(server.address, corpus)))
    assert prints[0] == prints[1] != prints[2]
    assert prints[0]["files"][0]["bytes"] == 6 << 20


def test_without_a_version_and_a_size_a_fingerprint_is_of_the_first_mib_and_a_warning_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    corpus, prints = CorpusConfig(path="a.tsv"), []
    with web_server(tmp_path, ranges=False) as server:
        server.silent = True
        for text in ("x", "x", "y"):
            (tmp_path / "a.tsv").write_text(text * (3 << 20))
            (found,) = corpus_fingerprint(corpus, data_at(server.address, corpus))["files"]
            prints.append(found)
    assert prints[0] == prints[1] != prints[2]
    assert prints[0]["beginning_sha256"] == hashlib.sha256(b"x" * (1 << 20)).hexdigest()
    assert caplog.text.count(f"{server.address}/a.tsv: its server tells no version") == 1


def test_an_index_of_parquet_files_is_the_same_wherever_they_lie(tmp_path: Path, web: WebServer, memory: str):
    write_corpora(str(tmp_path))
    write(memory, "a.parquet", (tmp_path / "a.parquet").read_bytes())
    corpus = CorpusConfig(path="a.p*t")
    for root in (str(tmp_path), memory, web.address):
        (found,) = parquet_index(corpus, data_at(root, corpus))
        assert found.rows == (64, 64, 64, 64, 44)
        assert found.bytes == (tmp_path / "a.parquet").stat().st_size
        assert (found.source, found.target) == ("de", "en")
        assert open_parquet(found.file).read_row_group(4, columns=["de"]).column("de").to_pylist() == [
            source for source, _ in PAIRS[256:]
        ]
        assert scan_corpus(corpus, data_at(root, corpus)) == len(PAIRS)


def test_remote_text_is_not_read_before_it_is_needed(tmp_path: Path, web: WebServer):
    write_corpora(str(tmp_path))
    for corpus in (CorpusConfig(source="a.de", target="a.en"), CorpusConfig(path="a.csv")):
        assert scan_corpus(corpus, data_at(web.address, corpus)) is None
        assert is_text_at_hand(corpus, data_at(web.address, corpus))
    assert web.bytes_sent == 0


# ---------------------------------------------------------------------------------------------------------- faults


def test_a_busy_server_is_asked_again(tmp_path: Path, web: WebServer):
    write_corpora(str(tmp_path))
    for corpus in (CorpusConfig(path="a.tsv"), CorpusConfig(path="a.parquet")):
        web.failures = 1
        assert read(web.address, corpus) == PAIRS
        assert web.failures == 0
    web.failures = 100
    for corpus in (CorpusConfig(path="a.tsv"), CorpusConfig(path="a.parquet"), CorpusConfig(path="*.tsv")):
        with pytest.raises(MachineError, match=rf"{web.address}/.*: cannot be read: .*503"):
            read(web.address, corpus)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["busy", "whole"])
@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow", "a.tsv"])
def test_each_request_may_fail_once_or_bring_the_whole_file(
    tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch, name: str, fault: str
):
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: None)
    write_corpora(str(tmp_path))
    corpus = CorpusConfig(path=name)
    expected = corpus_fingerprint(corpus, data_at(web.address, corpus))
    assert read(web.address, corpus) == PAIRS
    for number in range(1, web.requests.total() + 1):
        web.faults = {web.requests.total() + number: fault}
        assert corpus_fingerprint(corpus, data_at(web.address, corpus)) == expected
        assert read(web.address, corpus) == PAIRS
        assert not web.faults


def test_a_read_of_a_file_in_parts_has_so_many_attempts_and_no_more(
    tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 3)
    write_corpora(str(tmp_path))
    corpus = CorpusConfig(path="a.parquet")
    assert read(web.address, corpus) == PAIRS
    num_requests = web.requests.total()
    web.faults = dict.fromkeys(range(num_requests + 4, num_requests + 1000), "busy")  # the first read of its footer
    with pytest.raises(MachineError, match=rf"{web.address}/a\.parquet: cannot be read: .*503"):
        read(web.address, corpus)
    assert web.requests.total() == num_requests + 3 + 3


def test_a_server_of_whole_files_is_asked_again_at_the_start(tmp_path: Path):
    write_corpora(str(tmp_path))
    with web_server(tmp_path, ranges=False) as server:
        assert read(server.address, CorpusConfig(path="a.tsv")) == PAIRS
        for number in range(1, server.requests.total() + 1):
            server.faults = {server.requests.total() + number: "busy"}
            assert read(server.address, CorpusConfig(path="a.tsv")) == PAIRS
            assert not server.faults


class _Flaky(MemoryFileSystem):
    """Fails every second read."""

    protocol = "flaky"
    store = MemoryFileSystem.store
    pseudo_dirs = MemoryFileSystem.pseudo_dirs
    num_reads = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flaky://", "memory://")))

    def open(self, path: str, mode: str = "rb", **options: object):
        file = super().open(path, mode, **options)
        whole_read = file.read

        def read(size: int = -1) -> bytes:
            type(self).num_reads += 1
            if self.num_reads % 2:
                raise TimeoutError("the network is slow")
            return whole_read(size)

        file.read = read
        return file


def test_a_read_that_fails_on_the_way_is_tried_again_from_where_it_was(memory: str, monkeypatch: pytest.MonkeyPatch):
    fsspec.register_implementation("flaky", _Flaky, clobber=True)
    content = "".join(f"s {n}\tt {n}\n" for n in range(30_000))
    write(memory, "a.tsv", content.encode())
    root = memory.replace("memory://", "flaky://")
    assert read(root, CorpusConfig(path="a.tsv")) == [(f"s {n}", f"t {n}") for n in range(30_000)]
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)
    with pytest.raises(MachineError, match=r"flaky://.*a\.tsv: cannot be read.* TimeoutError: the network is slow"):
        read(root, CorpusConfig(path="a.tsv"))


@pytest.mark.usefixtures("one_attempt")
@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_breaks_is_said_with_its_address(tmp_path: Path, ranges: bool):
    write_corpora(str(tmp_path))
    (tmp_path / "a.tsv").write_bytes(b"source\ttarget\n" * 600_000)
    with web_server(tmp_path, ranges) as server:
        server.cut = 0.5
        for name in ("a.tsv", "a.parquet")[: 1 + ranges]:
            with pytest.raises(MachineError, match=rf"{server.address}/{name}: cannot be read"):
                read(server.address, CorpusConfig(path=name))


@pytest.mark.usefixtures("one_attempt")
def test_a_file_that_is_not_there_and_a_server_that_is_not_there_are_named(tmp_path: Path):
    with web_server(tmp_path) as server:
        address = server.address
        for corpus in (CorpusConfig(path="none.tsv"), CorpusConfig(path="none.parquet")):
            with pytest.raises(DataError, match=rf"{address}/none\..*: no such file\. Check the address"):
                read(address, corpus)
            with pytest.raises(DataError, match=rf"{address}/none\..*: no such file\. Check the address"):
                corpus_fingerprint(corpus, data_at(address, corpus))
    with pytest.raises(MachineError, match=rf"{address}/a\.tsv: cannot be read: "):
        read(address, CorpusConfig(path="a.tsv"))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path: Path, web: WebServer, suffix: str):
    noise, file = np.random.default_rng(0), tmp_path / f"a.tsv{suffix}"
    lines = b"".join(b"%s\t%d\n" % (noise.bytes(50).hex().encode(), n) for n in range(200_000))
    file.write_bytes(gzip.compress(lines, 1) if suffix else lines)
    corpus = CorpusConfig(path=file.name)
    batches = read_corpus(corpus, data_at(web.address, corpus), 64)
    next(batches)
    file.write_bytes(file.read_bytes()[: 1 << 20])
    with pytest.raises(DataError, match=rf"{web.address}/{file.name}: changed while it was read: it is shorter now"):
        list(batches)


def test_a_filesystem_whose_package_is_missing_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "some_cloud_fs", None)
    fsspec.register_implementation("somecloud", "some_cloud_fs.FileSystem", errtxt="install it", clobber=True)
    for path in ("a.tsv", "a.parquet", "*.tsv"):
        with pytest.raises(DataError, match=r"somecloud:// needs the package some_cloud_fs: pip install some_cloud_fs"):
            read("somecloud://bucket", CorpusConfig(path=path))
    with pytest.raises(DataError, match=r"nowhere://bucket/a\.tsv: not an address that can be read: .*nowhere"):
        read("nowhere://bucket", CorpusConfig(path="a.tsv"))
