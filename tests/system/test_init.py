"""From text to a configuration that trains: by options, by questions on a terminal, and what is refused."""

import json
import os
import pty
import re
import select
import subprocess
from pathlib import Path

import pytest
import yaml
from running import NOT_INHERITED, PROGRAM, Command, records, without

QUICK = ("data.max_tokens=512", "data.loader_workers=0", "model.d_model=32", "model.d_ff=64", "tracking.enabled=false",
         "model.num_encoder_layers=1", "model.num_decoder_layers=1", "validation.translate=false")  # fmt: skip
ALONE = {"PATH": "/usr/bin-without-slurm"}


def values(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_two_files_become_a_configuration_that_is_sound_and_trains(command: Command) -> None:
    out = command("init", "train.en", "train.de", "--name", "mine", "--max-steps", "4", **ALONE)
    for text in (
        "600 pairs",
        "en: Latin",
        "de: Latin",
        "source language en",
        "size of the model tiny",
        "train mine.yaml",
    ):
        assert text in out
    text = (command.folder / "mine.yaml").read_text()
    settings = [line for line in text.splitlines() if ": " in line and line.strip()[0] != "#"]
    assert sum("# " in line for line in settings) >= 14  # a reason beside each
    assert "slurm:" not in text
    sizes = {path.name: len(path.read_text().splitlines()) for path in (command.folder / "mine-text").iterdir()}
    assert sizes["validation.en"] == sizes["validation.de"] == sizes["test.en"] == sizes["test.de"] == 20
    assert sizes["train.en"] == sizes["train.de"] <= 560
    assert "no problem found" in command("config", "check", "mine.yaml")
    command("train", "mine.yaml", *QUICK)
    run = command.folder / "runs" / "mine"
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4]
    assert records(run, "validation")
    again = command("init", "train.en", "train.de", "--name", "mine", code=2)
    assert "mine.yaml: is there already" in again
    assert (command.folder / "mine.yaml").read_text() == text


@pytest.mark.slow
def test_a_terminal_is_asked_and_enter_takes_what_is_proposed(command: Command) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "init", "train.en", "train.de"],
        cwd=command.folder, stdin=theirs, stdout=theirs, stderr=theirs, env={**without(NOT_INHERITED), "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    answers = {"source language (en)": "", "target language (de)": "fr", "name of the run (en-fr)": "asked",
               "as many for the test (20)": "30", "[tiny/small/base/big] (tiny)": "small"}  # fmt: skip
    shown = ""
    try:
        while select.select([ours], [], [], 120)[0] and (part := os.read(ours, 65536)):
            shown += re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", part.decode(errors="replace"))
            if answers and (question := next(iter(answers))) in shown:
                os.write(ours, answers.pop(question).encode() + b"\n")
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    os.close(ours)
    assert process.wait(240) == 0, shown
    assert answers == {}
    assert "not asked" not in shown
    written = values(command.folder / "asked.yaml")
    assert written["data"]["target_language"] == "fr"
    assert written["model"]["preset"] == "small"
    assert len((command.folder / "asked-text" / "test.fr").read_text().splitlines()) == 30


@pytest.mark.slow
def test_a_table_and_given_files_need_no_copy(command: Command) -> None:
    pairs = zip(*((command.folder / f"train.{code}").read_text().splitlines() for code in ("en", "de")), strict=True)
    (command.folder / "t.jsonl").write_text("".join(json.dumps({"x": en, "y": de}) + "\n" for en, de in pairs))
    command("init", "t.jsonl", "--columns", "x", "y", "--source-language", "en", "--target-language", "de", "--validation",
            "valid.en", "valid.de", "--test", "valid.en", "valid.de", "--out", "table.yaml")  # fmt: skip
    data = values(command.folder / "table.yaml")["data"]
    assert data["train"] == {"path": str(command.folder / "t.jsonl"), "columns": ["x", "y"]}
    assert data["test"]["source"] == str(command.folder / "valid.en")
    assert not (command.folder / "table-text").exists()
    assert "no problem found" in command("config", "check", "table.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "codes"),
    [(("translation.en", "translation.de"), ("en", "de")), (("Text (EN)", "Text (DE)"), ("source", "target"))],
)
def test_languages_are_proposed_that_are_codes_whatever_the_columns_are_named(
    command: Command, columns: tuple[str, str], codes: tuple[str, str]
) -> None:
    pairs = zip(*((command.folder / f"train.{code}").read_text().splitlines() for code in ("en", "de")), strict=True)
    rows = ({"translation": {"en": en, "de": de}, "Text (EN)": en, "Text (DE)": de} for en, de in pairs)
    (command.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command("init", "-y", "rows.jsonl", "--columns", *columns, "--name", f"of-{codes[0]}")
    data = values(command.folder / f"of-{codes[0]}.yaml")["data"]
    assert (data["source_language"], data["target_language"]) == codes


@pytest.mark.slow
def test_a_tsv_has_two_columns_or_a_first_line_with_the_languages_or_is_given_its_columns(command: Command) -> None:
    rows = [f"{number}\tword {number}\tWort {number}\n" for number in range(40)]
    (command.folder / "three.tsv").write_text("id\tenglish\tgerman\n" + "".join(rows))
    (command.folder / "named.tsv").write_text("id\ten\tde\n" + "".join(rows))
    languages = ("--source-language", "en", "--target-language", "de", "-y")
    refused = command("init", "three.tsv", *languages, "--name", "three", code=2)
    assert "expected two columns, or a first line with the names en and de; got 3: id, english, german" in refused
    assert "give --columns 0 1, counted from 0, or its names if it is a header" in refused
    assert not (command.folder / "three.yaml").exists()
    command("init", "named.tsv", *languages, "--name", "named")
    command("init", "three.tsv", *languages, "--name", "given", "--columns", "english", "german")
    for name in ("named", "given"):
        assert (command.folder / f"{name}-text" / "train.de").read_text().startswith("Wort ")
        texts = [
            (command.folder / f"{name}-text" / f"{split}.en").read_text() for split in ("train", "validation", "test")
        ]
        assert sorted("".join(texts).splitlines()) == sorted(f"word {number}" for number in range(40))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "small", "base", "big"])
def test_each_size_of_the_model_gives_a_configuration_without_problems(command: Command, preset: str) -> None:
    command("init", "train.en", "train.de", "--yes", "--preset", preset, "--name", f"sized-{preset}")
    assert "no problem found" in command("config", "check", f"sized-{preset}.yaml")


def test_of_few_pairs_one_is_held_out_for_each(command: Command) -> None:
    for code in ("en", "de"):
        (command.folder / f"eight.{code}").write_text("".join(f"{number} {code}\n" for number in range(8)))
    command("init", "eight.en", "eight.de", "--yes", "--name", "eight")
    sizes = {path.name: len(path.read_text().splitlines()) for path in (command.folder / "eight-text").glob("*.en")}
    assert sizes == {"train.en": 6, "validation.en": 1, "test.en": 1}


def test_a_configuration_cannot_go_where_train_would_not_read_it(command: Command) -> None:
    said = command("init", "train.en", "train.de", "--yes", "--out", "/dev/stdout", code=2)
    assert "--out /dev/stdout: is a device or a pipe, expected a file" in said


@pytest.mark.slow
def test_a_profile_or_sbatch_gives_a_slurm_section_with_no_more_ranks_than_lanes(
    command: Command, tmp_path: Path
) -> None:
    command("init", "train.en", "train.de", "--out", "sub/profile.yaml", "--cluster", "infiniband")
    slurm = values(command.folder / "sub/profile.yaml")["slurm"]
    assert slurm == {"cluster": "infiniband", "ranks_per_node": 2, "gpus_per_node": 2}
    assert "no problem found" in command("config", "check", "sub/profile.yaml")
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    out = command("init", "train.en", "train.de", "--out", "found it.yaml", "--name", "found", PATH=str(tmp_path))
    assert "dist-transformer submit 'found it.yaml'" in out
    assert "dist-transformer plan 'found it.yaml'" in (command.folder / "found it.yaml").read_text()
    assert values(command.folder / "found it.yaml")["slurm"] == {"ranks_per_node": 1, "gpus_per_node": 1}


def test_text_that_another_program_cut_is_warned_of(command: Command) -> None:
    (command.folder / "cut.en").write_text("".join(f"{number} litt@@ le words\n" for number in range(40)))
    (command.folder / "cut.de").write_text("".join(f"{number} kleine Wörter\n" for number in range(40)))
    said = command("init", "cut.en", "cut.de", "--name", "cut", **ALONE)
    assert "40 pairs, 25 distinct characters" in said
    assert "the text: 40 of 80 lines look cut by subword-nmt (gir@@ l): give the text as it was before" in said


def test_full_width_punctuation_of_a_chinese_target_is_kept(command: Command) -> None:
    (command.folder / "c.en").write_text("".join(f"{number} words\n" for number in range(40)))
    (command.folder / "c.zh").write_text(
        "".join(f"{number} \u4f60\u597d\uff0c\u4e16\u754c\uff01\n" for number in range(40))
    )
    command("init", "c.en", "c.zh", "--name", "chinese", **ALONE)
    assert values(command.folder / "chinese.yaml")["tokenizer"]["normalization"] == "identity"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train.en", "valid.de"), "train.en has 600 lines, but"),
        (("none.en", "train.de"), "none.en: no such file"),
        (("train.en", "train.de", "--target-language", "en"), "en and en: expected two codes"),
        (("train.en", "train.de", "--target-language", "../x"), "expected two codes"),
        (("train.en", "train.de", "--name", "a/b"), "run.name: 'a/b': expected letters"),
        (("train.en", "train.de", "--held-out", "500"), "expected 1 to 150"),
        (
            ("one.en", "one.de", "-y"),
            "1 different pairs of text: expected 4 at least, or --validation and --test\n",
        ),
        (("one.en", "one.de", "--held-out", "1"), "1 different pairs of text: expected 4 at least"),
        (("train.en", "train.de", "--cluster", "nowhere"), "no profile 'nowhere'"),
        (("small.yaml",), "small.yaml: cannot tell the format"),
        (("t.csv",), 'e.g. columns: ["english, plain", "german"], for `init` --columns \'english, plain\' german.\n'),
        (("blank.en", "train.de"), "0 different pairs of text: expected 4 at least"),
        (("train.en", "train.de", "--test", "valid.en", "none.de"), "none.de: no such file.\n"),
        (
            ("train.en", "train.de", "--test", "train.en", "train.de"),
            "--test: is the training text itself; give another",
        ),
        (("train.en", "train.de", "--validation", "valid.en", "train.de"), "valid.en has 40 lines, but"),
    ],
)
def test_what_is_refused_says_why_and_writes_nothing(
    command: Command, arguments: tuple[str, ...], message: str
) -> None:
    for name in ("one.en", "one.de"):
        (command.folder / name).write_text("one\n")
    (command.folder / "t.csv").write_text('"english, plain",german\none,eins\n')
    (command.folder / "blank.en").write_text("\n" * 600)
    before = sorted(command.folder.iterdir())
    assert message in command("init", *arguments, code=2)
    assert sorted(command.folder.iterdir()) == before


@pytest.mark.slow
def test_a_disk_too_full_for_the_configuration_keeps_no_text_and_the_same_command_goes_on(command: Command) -> None:
    for name in ("few.en", "few.de"):
        (command.folder / name).write_text("".join(f"{number} words\n" for number in range(40)))
    before = sorted(command.folder.iterdir())
    small = [*PROGRAM, "init", "few.en", "few.de", "--name", "few"]
    limited = [
        "bash",
        "-c",
        'ulimit -f 2; exec "$@" <&-',
        "limited",
        *small,
    ]  # no input to ask; files of 2 kB, less than the configuration
    ended = subprocess.run(limited, cwd=command.folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "few.yaml: cannot be written" in ended.stderr
    assert "start again" in ended.stderr
    assert sorted(command.folder.iterdir()) == before
    command("init", "few.en", "few.de", "--name", "few")
    assert len((command.folder / "few-text" / "train.en").read_text().splitlines()) == 38


def test_no_torch_is_imported(command: Command) -> None:
    program = "import sys; from dist_transformer.cli.main import app; app(sys.argv[1:], standalone_mode=False)"
    check = "; assert not {'torch', 'datasets', 'mlflow'} & sys.modules.keys()"
    arguments = ["init", "train.en", "train.de", "--out", "without.yaml"]
    subprocess.run([PROGRAM[0], "-c", program + check, *arguments], cwd=command.folder, check=True, capture_output=True)
