"""The package as a library: an outside program, its types, its page, what an import costs."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_page import PAGE, PROGRAM, page
from running import Command

import dist_transformer
from dist_transformer.decoding.search_settings import search_settings
from dist_transformer.errors import MachineError
from dist_transformer.files import write_json


def test_the_page_has_what_the_docstrings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/api/api_page.py --write"


@pytest.mark.slow
def test_an_outside_program_has_right_types(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_bytes(PROGRAM.read_bytes())
    (tmp_path / "wrong.py").write_text("import dist_transformer\n\ndist_transformer.train(1)\n")
    # No function of ours takes or returns a type of torch's, whose sources mypy would read for 11 CPU-seconds.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    options = ["--strict", "--python-executable", sys.executable, "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", *options, "program.py", "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if "error:" in line and line.startswith("program.py")] == []
    assert 'wrong.py:3: error: Argument 1 to "train"' in done.stdout


@pytest.mark.slow
def test_an_outside_program_trains_resumes_translates_and_reads(command: Command) -> None:
    (command.folder / "my.yaml").write_bytes((command.folder / "small.yaml").read_bytes())
    done = subprocess.run(
        [sys.executable, PROGRAM], cwd=command.folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    records = [line for line in lines if line.split(" ")[0].isdecimal() and len(line.split(" ")) == 2]
    assert [int(line.split(" ")[0]) for line in records[:6]] == [1, 2, 3, 4, 5, 6]
    assert any(line.startswith("finished 4 ") for line in lines)
    assert any("BLEU" in line or "nrefs:1" in line for line in lines)
    assert "99 ranks, but data.lanes is 4" in done.stdout


def test_names_are_imported_when_they_are_asked_for() -> None:
    code = "import dist_transformer, sys; assert not {'torch', 'yaml', 'pydantic'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        dist_transformer.trian  # noqa: B018
    assert len(dist_transformer.__all__) <= 12


def test_a_rank_that_fails_and_a_folder_without_a_run_are_exceptions(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(dist_transformer.UserError, match="expected a run folder"):
        dist_transformer.Run(tmp_path)
    translator = object.__new__(dist_transformer.Translator)  # these mistakes are found before its model is asked
    with pytest.raises(
        dist_transformer.UserError, match=r"takes a line of text, got list: call its translate\(lines\)"
    ):
        translator(["one", "two"])  # type: ignore[arg-type]
    with pytest.raises(dist_transformer.UserError, match="takes lines, got one text"):
        translator.translate("one")
    monkeypatch.setattr("dist_transformer.processes.launching.start_local_ranks", lambda *_, **__: 70)
    for ranks in (0, -1, "2", 1.0, True):
        with pytest.raises(
            dist_transformer.UserError, match=f"ranks: expected a whole number from 1 on, got {ranks!r}"
        ):
            dist_transformer.train(small_corpus / "small.yaml", ranks)  # type: ignore[arg-type]
    with pytest.raises(
        dist_transformer.UserError, match=r"expected an override, section\.key=value, as text, got list"
    ):
        dist_transformer.load_config(small_corpus / "small.yaml", ["a=4"])  # type: ignore[arg-type]
    with pytest.raises(MachineError, match="training ended with exit code 70"):
        dist_transformer.train(small_corpus / "small.yaml")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"source": "s.en"}, "--source and --reference belong together"),
        ({"references": ["ref.de"]}, "--source and --reference belong together"),
        ({"references": "ref.de", "source": "s.en"}, "references: expected a list of files, got 'ref.de'"),
        ({"n_best": 2}, "n_best: got 2, but one translation of each line is scored"),
    ],
)
def test_what_evaluate_cannot_score_is_refused_before_anything_is_read(given: dict[str, Any], message: str) -> None:
    with pytest.raises(dist_transformer.UserError, match=message):
        dist_transformer.evaluate("a folder", **given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam_size": 0}, r"beam_size: input should be greater than 0; got 0 \(int\)"),
        ({"beam": 4}, "beam: no such setting; did you mean `beam_size`"),
        ({"top_k": 4}, "top_k: is of sampling, which is off"),
    ],
)
def test_a_wrong_setting_of_a_search_has_its_name_from_python(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(dist_transformer.UserError, match=message):
        search_settings(Path("a folder"), **settings)


def test_a_damaged_record_costs_no_step_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    records = [
        '{"event": "train", "step": 7, "time": 1.0}',
        '{"event": "train", "time": 2.0}',
        '{"event": "train", "st',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records))
    run = dist_transformer.Run(tmp_path)
    assert run.step == 7
    assert "step=7" in repr(run)
    assert len([*run.metrics()]) == len([*run.metrics("train")]) == 2


class Reader:
    """In place of a model: reads the lines as one does."""

    def translate(self, lines: Any) -> Any:
        return (line.strip() for line in lines)


@pytest.mark.parametrize("lines", [["a", None], [b"abc"], b"abc"])
def test_lines_that_are_no_text_are_refused(lines: Any) -> None:
    translator = object.__new__(dist_transformer.Translator)
    translator._translator, translator._unchecked = Reader(), None  # type: ignore[assignment]
    with pytest.raises(dist_transformer.UserError, match=r"expected a line as text, got (NoneType|bytes|int)"):
        list(translator.translate(lines))


def test_a_translator_warns_once_of_lines_without_the_tags_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "config.yaml", {"data": {"train": {"demo": "train", "tags": ["<2de>"]}}})
    translator = object.__new__(dist_transformer.Translator)
    translator._translator, translator._unchecked = Reader(), tmp_path  # type: ignore[assignment]
    for _ in range(2):
        assert [*translator.translate(["one", "two"])] == ["one", "two"]
    assert capsys.readouterr().err == "warning: no line begins with <2de>, as every training sentence did\n"


def test_training_outside_of_the_main_thread_is_refused_with_what_to_do(small_corpus: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(dist_transformer.train, small_corpus / "small.yaml").exception()
    assert isinstance(found, dist_transformer.UserError)
    assert "train: call it in the main thread" in str(found)
