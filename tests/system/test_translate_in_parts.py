"""A file translated in parts on any ranks: what the stream gives, whatever stops it, and only with what it began with."""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from running import NOT_INHERITED, PROGRAM, Command, with_constants, without
from translate_command import LINES, SETTINGS, SOURCES, invoke, make_model, refused, said
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import train_tokenizer
from dist_transformer.decoding import sharded_files, translate
from dist_transformer.decoding import translate_file as cli_translate_file
from dist_transformer.decoding.engines import open_search
from dist_transformer.decoding.loaded_model import Search
from dist_transformer.decoding.translate_file import translate_file
from dist_transformer.decoding.translation_lines import Task
from dist_transformer.errors import EXIT_REQUEUE, UserError
from dist_transformer.interop.ctranslate2_export import export_ctranslate2, read_vocabularies
from dist_transformer.interop.model_folder import load_model_folder
from dist_transformer.interop.shortlist import VOCABULARY_MAP
from dist_transformer.processes.stop_request import StopRequest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    train_tokenizer(iter(SOURCES), TokenizerConfig(vocabulary_size=200), folder / "one.model")
    return make_model(folder / "one", folder / "one.model", 1)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "two", model.parent / "one.model", 2)


@dataclass
class Ranks:
    """Translates SOURCES in parts, as ranks of a job do, one after the other in this process."""

    monkeypatch: pytest.MonkeyPatch
    source: Path

    def run(self, task: Task, output: Path, rank: int, num_ranks: int, stop: StopRequest | None = None) -> None:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", num_ranks)):
            self.monkeypatch.setenv(name, str(value))
        translate_file(task, self.source, output, stop or StopRequest())


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ranks:
    monkeypatch.setattr(sharded_files, "SMALLEST_CHUNK_LINES", 7)
    monkeypatch.setattr(sharded_files, "MOST_SMALL_CHUNKS", 10)
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in SOURCES[:60]), encoding="utf-8")
    return Ranks(monkeypatch, tmp_path / "source")


def test_a_file_on_any_ranks_is_what_the_stream_gives(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    draw = ("--sampling", "--n-best", 2, "--seed", 7)
    expected = [line.split(" ||| ") for line in said("translate", model, *draw, lines=SOURCES[:60])]
    task = Task([model], DecodingConfig(sampling=True, n_best=2, seed=7), "torch")
    for number, order in enumerate(([0], [2, 0, 1], [1, 0, 3, 2])):
        output = tmp_path / f"out{number}"
        for rank in order:
            assert not output.exists()
            ranks.run(task, output, rank, len(order))
        found = [line.split(" ||| ") for line in output.read_text(encoding="utf-8").split("\n")[:-1]]
        assert [line[:2] for line in found] == [line[:2] for line in expected]
        # Other batches, other sums in the last bits.
        assert [float(line[3]) for line in found] == pytest.approx([float(line[3]) for line in expected], abs=0.01)


def test_minimum_bayes_risk_in_parts_is_that_of_the_stream(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    expected = said("translate", model, "--sampling", "--mbr", 4, "--seed", 7, lines=SOURCES[:60])
    task = Task([model], DecodingConfig(sampling=True, n_best=4, seed=7), "torch", mbr=True)
    for rank in (1, 0, 2):
        ranks.run(task, tmp_path / "out", rank, 3)
    assert (tmp_path / "out").read_text(encoding="utf-8").split("\n")[:-1] == expected


@pytest.mark.parametrize(("restarts", "comes_back"), [(0, True), (2, True), (3, False), (9, False)])
def test_a_job_that_is_stopped_before_any_part_is_done_does_not_come_back_for_ever(
    restarts: int, comes_back: bool, ranks: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that takes longer than the job's time limit is begun anew by each attempt."""
    task, output = Task([model], SETTINGS, "torch"), tmp_path / "out"
    ranks.run(task, output, 1, 3)  # some parts are done already
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    stop = StopRequest()
    stop.end_after(0.0)
    if comes_back:
        with pytest.raises(SystemExit) as stopped:
            ranks.run(task, output, 0, 3, stop)
        assert stopped.value.code == EXIT_REQUEUE
    else:
        with pytest.raises(UserError, match=r"no part was done since the last: 3 of 9 are; give the job more time"):
            ranks.run(task, output, 0, 3, stop)


def test_a_job_that_was_restarted_often_comes_back_as_long_as_parts_get_done(
    ranks: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "9")
    stop, write = StopRequest(), sharded_files.Parts.write

    def write_and_be_stopped(parts: sharded_files.Parts, chunk: int, lines: list[str]) -> None:
        write(parts, chunk, lines)
        stop.end_after(0.0)

    monkeypatch.setattr(sharded_files.Parts, "write", write_and_be_stopped)
    with pytest.raises(SystemExit) as stopped:
        ranks.run(Task([model], SETTINGS, "torch"), tmp_path / "out", 0, 2, stop)
    assert stopped.value.code == EXIT_REQUEUE


def test_a_stop_is_seen_between_the_pieces_of_one_long_line(
    ranks: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is cut is complete only with the last batch of its search."""
    ranks.source.write_text(" ".join(SOURCES[:60]) + "\n", encoding="utf-8")
    settings = DecodingConfig(beam_size=1, max_tokens=64, max_source_tokens=32, too_long="split")
    stop, batches, search = StopRequest(), [], translate._search

    def search_and_be_stopped(*about: Any) -> Any:
        batches.append(about)
        stop.end_after(0.0)
        return search(*about)

    monkeypatch.setattr(translate, "_search", search_and_be_stopped)
    with pytest.raises(SystemExit) as stopped:
        ranks.run(Task([model], settings, "torch"), tmp_path / "out", 0, 1, stop)
    assert stopped.value.code == EXIT_REQUEUE
    assert len(batches) == 1


def test_a_new_start_on_other_ranks_makes_only_what_is_missing(
    ranks: Ranks, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Task([model], SETTINGS, "torch")
    ranks.run(task, tmp_path / "whole", 0, 1)
    output, parts = tmp_path / "out", tmp_path / "out.parts"
    ranks.run(task, output, 1, 3)
    made = {path: path.stat().st_mtime_ns for path in parts.glob("*.txt")}
    assert sorted(path.name for path in made) == ["0000001.txt", "0000004.txt", "0000007.txt"]
    ranks.run(task, output, 0, 2)
    assert {path: path.stat().st_mtime_ns for path in made} == made
    ranks.run(task, output, 1, 2)
    assert output.read_bytes() == (tmp_path / "whole").read_bytes()
    assert not parts.exists()
    capsys.readouterr()
    for rank in range(2):
        ranks.run(task, output, rank, 2)
    assert capsys.readouterr().err == f"{output}: is there already\n", "the first rank says it"


def test_a_changed_model_search_or_input_is_refused(
    ranks: Ranks, model: Path, other_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    ranks.run(Task([model], SETTINGS, "torch"), output, 0, 2)
    more = SETTINGS.model_copy(update={"beam_size": 3})
    batches = SETTINGS.model_copy(update={"max_tokens": 100, "too_long": "split"})
    for task, changed in (
        (Task([other_model], SETTINGS, "torch"), "model 1: model.safetensors: "),
        (Task([model], more, "torch"), "decoding.beam_size: 2 there, 3 now"),
        (Task([model, other_model], SETTINGS, "torch"), "model 2: config.json: none there"),
        (Task([model], SETTINGS, "torch", None, True, False), "alignment: False there, True now"),
        (Task([model], SETTINGS, "torch", ranks.source), "prefixes: none there"),
        (Task([model], SETTINGS, "torch", mbr=True), "mbr: none there, True now"),
    ):
        with pytest.raises(UserError) as refusal:
            ranks.run(task, output, 1, 2)
        assert changed in str(refusal.value)
        assert not refusal.value.is_agreed, "another rank may be on another node, and see other files"
    ranks.run(Task([model], batches, "torch"), output, 1, 2)
    assert output.exists()
    with ranks.source.open("a", encoding="utf-8") as file:
        file.write("one more\n")
    with pytest.raises(UserError, match=r"input: \w{12} there, \w{12} now; lines: 60 there, 61 now"):
        ranks.run(Task([model], SETTINGS, "torch"), output, 0, 2)


def test_another_shortlist_and_other_batches_beside_it_are_refused(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    """With a shortlist, a translation may have the tokens of all sentences of its batch."""
    pytest.importorskip("ctranslate2")
    exported, output = tmp_path / "exported", tmp_path / "out"
    export_ctranslate2(load_model_folder(model), exported)
    batches = SETTINGS.model_copy(update={"max_tokens": 100})
    every = " ".join(read_vocabularies(exported)[1])
    ranks.run(Task([exported], SETTINGS, "ctranslate2"), tmp_path / "without", 0, 2)
    ranks.run(Task([exported], batches, "ctranslate2"), tmp_path / "without", 1, 2)
    (exported / VOCABULARY_MAP).write_text(f"\t{every}\n", encoding="utf-8")
    ranks.run(Task([exported], SETTINGS, "ctranslate2"), output, 0, 2)
    with pytest.raises(UserError, match=r"decoding.max_tokens: \d+ there, 100 now"):
        ranks.run(Task([exported], batches, "ctranslate2"), output, 1, 2)
    (exported / VOCABULARY_MAP).write_text(f"\t{every[: len(every) // 2]}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"model 1: vmap.txt: \w{12} there, \w{12} now"):
        ranks.run(Task([exported], SETTINGS, "ctranslate2"), output, 1, 2)


def test_each_line_of_a_file_has_its_prefix_in_every_part(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    prefixes = tmp_path / "prefixes"
    prefixes.write_text("".join(f"{source.split()[0]}\n" for source in SOURCES[:60]), encoding="utf-8")
    task = Task([model], SETTINGS, "torch", prefixes, False, False)
    ranks.run(task, tmp_path / "out", 0, 1)
    found = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert all(text.startswith(source.split()[0]) for text, source in zip(found, SOURCES[:60], strict=True))
    prefixes.write_text("one\n", encoding="utf-8")
    with pytest.raises(UserError, match="1 prefixes for the 60 lines"):
        ranks.run(task, tmp_path / "out2", 0, 1)


def test_a_file_that_changes_while_it_is_translated_is_refused(
    ranks: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*arguments: Any) -> Search:
        ranks.source.write_text("one\n", encoding="utf-8")
        return open_search(*arguments)

    monkeypatch.setattr(cli_translate_file, "open_search", begun)
    task = Task([model], SETTINGS, "torch")
    with pytest.raises(UserError, match="source: changed while it was read"):
        ranks.run(task, tmp_path / "out", 0, 1)
    assert not list((tmp_path / "out.parts").glob("*.txt"))


@pytest.mark.parametrize("changed", ["source", "prefixes"])
def test_parts_of_a_file_that_changed_and_was_put_back_are_of_one_text(
    changed: str, ranks: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefixes").write_text("".join(f"{source.split()[0]}\n" for source in SOURCES[:60]), encoding="utf-8")
    task, file, write = (
        Task([model], SETTINGS, "torch", tmp_path / "prefixes"),
        tmp_path / changed,
        sharded_files.Parts.write,
    )
    ranks.run(task, tmp_path / "whole", 0, 1)
    before = file.read_bytes()

    def write_and_change(parts: sharded_files.Parts, chunk: int, lines: list[str]) -> None:
        write(parts, chunk, lines)
        file.write_bytes(before[::-1].strip() + b"\n")  # as many bytes and lines

    os.utime(file, (0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(sharded_files.Parts, "write", write_and_change)
        with pytest.raises(UserError, match=f"{changed}: changed while it was read"):
            ranks.run(task, tmp_path / "out", 0, 1)
    assert [path.name for path in (tmp_path / "out.parts").glob("*.txt")] == ["0000000.txt"]
    file.write_bytes(before)
    ranks.run(task, tmp_path / "out", 0, 1)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def test_what_is_written_is_utf8_in_any_language(model: Path, tmp_path: Path) -> None:
    (tmp_path / "umlauts").write_text("zwölf\n", encoding="utf-8")
    runner, pair = CliRunner(charset="ascii"), ("--source", tmp_path / "umlauts", "--target", tmp_path / "umlauts")
    for arguments in (("translate", model, "--json"), ("score", model, "--json", *pair)):
        result = runner.invoke(app, [str(each) for each in arguments], input="zwölf €\n".encode())
        assert result.exception is None, result.exception
        json.loads(result.stdout_bytes.decode("utf-8"))


def test_scores_refuse_longer_lines_than_asked_for(model: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    pair = ("--source", tmp_path / "lines", "--target", tmp_path / "lines")
    told = refused("score", model, *pair, "--max-source-tokens", 3)
    assert f"{tmp_path}/lines and {tmp_path}/lines, line " in told
    assert "at most 3 are scored at once (--max-source-tokens, " in told
    lowest = ("score", model, *pair, "--max-source-tokens", 3, "--too-long", "lowest")
    done = invoke(*lowest)
    assert {line for line in done.stdout.splitlines() if line.count(".") == 0} == {"-inf"}
    assert done.stdout.count("\n") == len(LINES)
    num_longer = done.stdout.count("-inf")
    assert f"{len(LINES)} pairs, {num_longer} of them too long, " in done.stderr
    objects = [json.loads(line) for line in invoke(*lowest, "--json").stdout.splitlines()]
    assert [each["log_probability"] for each in objects].count(None) == num_longer


def test_a_full_disk_and_a_rank_alone_are_told_without_a_traceback(
    model: Path, tmp_path: Path, quick_client: Path
) -> None:
    command = Command(tmp_path, quick_client)
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [*PROGRAM, "translate", str(model)],
            input="one\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=without(NOT_INHERITED),
            check=False,
        )
    assert process.returncode == 1
    assert process.stderr == "dist-transformer: No space left on device: make room and start again\n"
    closed = ["sh", "-c", 'exec "$@" <&-', "closed", *PROGRAM, "translate", str(model)]
    process = subprocess.run(closed, stderr=subprocess.PIPE, text=True, env=without(NOT_INHERITED), check=False)
    assert process.returncode == 2
    assert process.stderr.startswith("dist-transformer: standard input: is closed, expected lines: give < FILE, or")
    assert process.stderr.count("\n") == 1
    options = ("--input", "absent", "--output", "out")
    said = command("translate", model, *options, code=2, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert "absent: cannot be read: No such file" in said


def test_ranks_that_are_stopped_end_with_75_and_the_same_command_goes_on(
    model: Path, tmp_path: Path, quick_client: Path
) -> None:
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in [*SOURCES, *SOURCES[:300]]), encoding="utf-8")
    (tmp_path / "link").symlink_to("out")
    command = Command(tmp_path, quick_client)
    arguments = ("translate", model, "--input", "source", "--output", "link", "--beam", 2)
    small = with_constants(
        {"decoding.sharded_files.SMALLEST_CHUNK_LINES": 9}
    )  # 100 parts: a stop comes before the last
    first = command.start(*arguments, "--max-tokens", 40, "--ranks", 2, **small)  # slow: a sentence or two a batch
    parts = tmp_path / "out.parts"
    while not list(parts.glob("*.txt")):
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    first.send_signal(signal.SIGUSR1)
    out, err = first.communicate(timeout=600)
    assert first.returncode == EXIT_REQUEUE, out + err
    assert "stopped while translating (signal SIGUSR1)" in err
    made = {path: path.stat().st_mtime_ns for path in parts.glob("*.txt")}
    assert 0 < len(made) < 100
    assert not [path for path in parts.iterdir() if path.name.endswith(".tmp")]
    assert "900 lines translated" in command(*arguments, "--ranks", 2, **small)
    lines = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 900
    assert lines[:300] == lines[600:], "the same lines, in other parts"
    assert said("translate", model, "--beam", 2, lines=SOURCES[:20]) == lines[:20]
