"""What people do with a trained model: translate, evaluate, average, and see the run in MLflow."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
from mlflow import MlflowClient
from running import records

from dist_transformer.interop.model_folder import load_model_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(train_small, command):
    """Tracked in the default store, stopped by its step limit and gone on with once."""
    train_small("tracked", "tracking.enabled=true", "validation.every_steps=3")
    return train_small("tracked", "tracking.enabled=true", "validation.every_steps=3", "training.max_steps=9")


def test_translate_keeps_order_and_leaves_empty_lines_empty(command, trained):
    text = "twenty-one\n\n  \nIt is nine o'clock.\n" + "twenty-one " * 60 + "\ntwenty-one\n"
    lines = command("translate", trained, text=text).split("\n")[:-1]
    assert len(lines) == 6
    assert lines[1] == lines[2] == ""
    assert lines[0] == lines[5] == command("translate", trained / "model", text="twenty-one\n").rstrip("\n")


FORKED = """
import multiprocessing, sys
from dist_transformer import Translator
translator = Translator(sys.argv[1])
child = multiprocessing.get_context("fork").Process(target=translator, args=("The house is blue.",))
child.start()
child.join(100)
child.kill()
sys.exit(child.exitcode)
"""


def test_a_translator_that_was_loaded_before_a_fork_translates_after_it(trained):
    """As in the workers of `multiprocessing.Pool` and `gunicorn --preload`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    assert (
        subprocess.run([sys.executable, "-c", FORKED, trained], env=environment, timeout=300, check=False).returncode
        == 0
    )


def test_evaluate_prints_and_keeps_scores_with_their_signatures(command, trained, small_corpus):
    said = command("evaluate", trained)
    kept = json.loads((trained / "evaluation" / "test.json").read_text(encoding="utf-8"))
    assert f"BLEU  {kept['bleu']:.2f}  {kept['bleu_signature']}" in said
    assert "tok:13a" in kept["bleu_signature"]
    assert (kept["pairs"], kept["step"], kept["target_language"]) == (40, 9, "de")
    texts = b"".join((trained / "evaluation" / f"test.{name}").read_bytes() for name in ("translations", "reference1"))
    assert kept["texts_sha256"] == hashlib.sha256(texts).hexdigest()
    files = ("--source", small_corpus / "valid.en", "--target", small_corpus / "valid.de")
    assert f"BLEU  {kept['bleu']:.2f}" in command("evaluate", trained / "model", *files)
    assert "|tok:zh|" in command("evaluate", trained / "model", *files, "--language-pair", "en-zh-Hans")


def test_text_without_the_tags_of_training_is_translated_with_a_warning(command, trained, small_corpus, tmp_path):
    shutil.copytree(trained / "model", tmp_path / "run" / "model")
    text = (trained / "config.yaml").read_text(encoding="utf-8").replace("tags: []", "tags: [<2de>]")
    (tmp_path / "run" / "config.yaml").write_text(text, encoding="utf-8")
    source, target = small_corpus / "valid.en", small_corpus / "valid.de"
    told = "warning: no line begins with <2de>, as every training sentence did"
    for words in (
        ["evaluate", "--source", source, "--reference", target],
        ["translate", "--input", source, "--output", tmp_path / "t.de"],
        ["score", "--source", source, "--target", target],
    ):
        verb, *options = words
        assert told in command(verb, tmp_path / "run", *options)
    assert told in command("translate", tmp_path / "run", text="one\n")
    assert told not in command("translate", tmp_path / "run", text="one\n<2de> one\n")


def test_evaluate_cuts_lines_above_the_limit_as_its_message_says(command, trained, small_corpus, tmp_path):
    files = (
        "--source",
        small_corpus / "valid.en",
        "--reference",
        small_corpus / "valid.de",
        "--output",
        tmp_path / "s",
    )
    said = command("evaluate", trained, *files, "--max-source-tokens", 4, code=2)
    assert "have it cut with --too-long split" in said
    command("evaluate", trained, *files, "--max-source-tokens", 4, "--too-long", "split")
    scores = json.loads((tmp_path / "s").read_text(encoding="utf-8"))
    assert (scores["too_long"], scores["max_source_tokens"]) == ("split", 4)


def test_evaluate_scores_modified_text_beside_the_clean_one_and_keeps_it_the_same_way(command, trained):
    names = ("test", "test.upper_case", "test.typos")
    kept = []
    for _ in range(2):
        said = command("evaluate", trained, "--modified", "upper_case", "--modified", "typos")
        kept.append(
            [json.loads((trained / "evaluation" / f"{name}.json").read_text(encoding="utf-8")) for name in names]
        )
    assert kept[0] == kept[1]
    clean, upper, typos = kept[0]
    for name, scores in zip(names[1:], (upper, typos), strict=True):
        assert f"{name} bleu {scores['bleu']:.2f} chrf {scores['chrf']:.2f} exact_match" in said
        assert len((trained / "evaluation" / f"{name}.translations").read_text(encoding="utf-8").splitlines()) == 40
    assert len({each["source_sha256"] for each in kept[0]}) == 3
    assert upper["reference_sha256"] != clean["reference_sha256"] == typos["reference_sha256"]
    client = MlflowClient(f"sqlite:///{command.folder / 'runs' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("dist-transformer").experiment_id])
    assert run.data.metrics["evaluation/test.typos/chrf"] == typos["chrf"]


def test_results_of_two_files_of_one_name_lie_side_by_side_and_say_what_was_scored(
    command, trained, small_corpus, tmp_path
):
    before = {path.name: path.read_bytes() for path in (trained / "evaluation").iterdir()}
    for folder, first in (("a", 0), ("b", 20)):
        (tmp_path / folder).mkdir()
        for language in ("en", "de"):
            lines = (small_corpus / f"valid.{language}").read_text(encoding="utf-8").splitlines(keepends=True)
            (tmp_path / folder / f"test.{language}").write_text("".join(lines[first : first + 20]), encoding="utf-8")
        files = ("--source", tmp_path / folder / "test.en", "--target", tmp_path / folder / "test.de")
        for _ in range(2):  # the same text once more is the same result
            command("evaluate", trained, *files)
    made = {path for path in (trained / "evaluation").glob("*.json") if path.name not in before}
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(made)]
    assert len(results) == 2
    assert all(path.name.startswith("test.en-") for path in made)
    lines = (tmp_path / "a" / "test.en").read_bytes()
    assert hashlib.sha256(lines).hexdigest() in {result["source_sha256"] for result in results}
    assert results[0]["reference_sha256"] != results[1]["reference_sha256"]
    assert {name: (trained / "evaluation" / name).read_bytes() for name in before} == before


def test_evaluate_scores_given_translations_against_several_references_as_sacrebleu_does(command, tmp_path):
    lines = {
        "ours": ["Das ist ein Haus .", "Er geht heim", "Guten Tag, Welt!"],
        "one": ["Das ist das Haus .", "Er geht nach Hause", "Guten Tag, Welt!"],
        "two": ["Dies ist ein Haus .", "Er geht heim", "Hallo Welt"],
        "zh": ["这是一座房子。", "他回家。", "你好世界。"],
    }
    for name, content in lines.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in content), encoding="utf-8")
    files = {name: tmp_path / name for name in lines}
    for references, pair in ((["one", "two"], []), (["two"], []), (["zh"], ["--language-pair", "en-zh"])):
        given = [option for name in references for option in ("--reference", files[name])]
        said = command("evaluate", "--hypothesis", files["ours"], *given, *pair)
        program = [sys.executable, "-m", "sacrebleu", *(files[name] for name in references), "-i", files["ours"]]
        asked = [*program, "-m", "bleu", "chrf", "-w", "4", "-l", pair[1] if pair else "en-de"]
        theirs = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
        for name, score in zip(("BLEU", "chrF"), theirs, strict=True):
            assert f"{name}  {score['score']:.2f}  {score['signature']}" in said
    assert "exact 66.67 %" in command(
        "evaluate", "--hypothesis", files["ours"], "--reference", files["one"], "--reference", files["two"]
    )
    of_chinese = ("evaluate", "--hypothesis", files["ours"], "--reference", files["zh"])
    assert "BLEU  0.00" in command(*of_chinese)
    for pair in ("en-zh-CN", "pt-BR-zh", "pt-BR-zh-Hans", "zh"):
        assert "|tok:zh|" in command(*of_chinese, "--language-pair", pair)


def test_evaluate_warns_of_references_that_another_program_cut(command, tmp_path):
    cut, given = tmp_path / "cut", ("evaluate", "--hypothesis", tmp_path / "cut", "--reference", tmp_path / "cut")
    cut.write_text("the litt@@ le girl &apos;s train\n", encoding="utf-8")
    both = command(*given)
    assert "the references: 1 of 1 lines look cut by subword-nmt (gir@@ l)" in both
    assert "lines look cut by Moses (&apos; &quot; @-@): give it detokenised" in both
    assert "look cut" not in command(*given, "--tokenised", "spaces")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected a run or model folder to translate with, or --hypothesis FILE"),
        (("RUN", "--hypothesis", "a"), "expected a run or model folder to translate with, or --hypothesis FILE"),
        (("--hypothesis", "a"), "--hypothesis needs --reference FILE"),
        (
            ("--hypothesis", "a", "--reference", "b", "--beam", 4),
            "--max-source-tokens: leave out with --hypothesis",
        ),
        (
            ("--hypothesis", "a", "--reference", "b", "--too-long", "split"),
            "--max-source-tokens: leave out with --hypothesis",
        ),
        (("--hypothesis", "a", "--reference", "b", "--metric-plugin", "x.py:f"), "--metric-plugin gets the source too"),
        (
            ("RUN", "--modified", "upper"),
            "--modified upper: no such modifier; there are no_final_punctuation, upper_case",
        ),
        (
            ("--hypothesis", "a", "--reference", "b", "--modified", "typos"),
            "--modified changes a source, which a model",
        ),
        (("RUN", "--source", "a"), "--source and --reference belong together"),
        (("RUN", "--language-pair", "en-de"), "--language-pair en-de: is of --hypothesis or --source"),
        (("--hypothesis", "valid.en", "--reference", "train.en"), "40"),
        (("--hypothesis", "gone", "--reference", "valid.en"), "gone"),
    ],
)
def test_what_evaluate_cannot_score_is_told(options, message, command, trained):
    said = command("evaluate", *(trained if option == "RUN" else option for option in options), code=2)
    assert message in said
    assert "Traceback" not in said


def test_evaluate_takes_no_objects_of_translate_for_text(command, trained, tmp_path):
    (tmp_path / "ours.json").write_text(command("translate", trained, "--json", text="Hello.\n"), encoding="utf-8")
    (tmp_path / "theirs").write_text("Hallo.\n", encoding="utf-8")
    given = ("--hypothesis", tmp_path / "ours.json", "--reference", tmp_path / "theirs")
    assert "expected text, got what `translate --json` writes" in command("evaluate", *given, code=2)


def test_evaluate_without_a_corpus_says_what_to_give(command, trained):
    assert "nothing to score; give --source and --reference" in command("evaluate", trained / "model", code=2)


def test_average_writes_a_model_folder_of_the_last_checkpoints(command, trained, tmp_path):
    assert "step_00000009" in command("average", trained, "--last", 1, "--output", tmp_path / "one")
    assert load_model_folder(tmp_path / "one").information.step == 9


def test_two_starts_are_one_run_in_mlflow_with_every_step_once(trained, command):
    client = MlflowClient(f"sqlite:///{command.folder / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dist-transformer")
    found = client.search_runs([experiment.experiment_id])
    assert len(found) == 1
    run = found[0]
    assert run.info.status == "FINISHED"
    assert run.data.params["model.d_model"] == "32"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(r["step"], r["loss"]) for r in records(trained)]
    validation = client.get_metric_history(run.info.run_id, "validation/loss")
    assert [m.step for m in validation] == [3, 6, 9]


def test_the_log_says_at_start_what_will_happen(trained):
    log = (trained / "train.log").read_text(encoding="utf-8")
    for words in ("parameters: 1 + 1 layers", "600 pairs", "4 lanes of 512 tokens", "ZeRO stage 0, 1 ranks", "memory "):
        assert words in log
    assert "start      step 0" in log
    assert "start      step 6, resumed from" in log


def test_run_json_says_how_the_run_stands(trained):
    state = json.loads((trained / "run.json").read_text(encoding="utf-8"))
    assert (state["state"], state["step"], state["starts"]) == ("finished", 9, 2)
