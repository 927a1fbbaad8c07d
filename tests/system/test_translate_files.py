"""translate and score as commands: forms of output, prefixes, ensembles, engines."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command_server import quick_command
from running import NOT_INHERITED, without
from sacrebleu.metrics import CHRF
from translate_command import LINES, SOURCES, invoke, make_model, refused, said

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.data.tokenizer.tokenizer import train_tokenizer
from dist_transformer.processes.stop_request import StopRequest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "one.model"
    train_tokenizer(iter(SOURCES), TokenizerConfig(vocabulary_size=200), path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "one", tokenizer_file, 1)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "two", tokenizer_file, 2)


def test_the_best_come_as_lines_as_lists_and_as_json_alike(model: Path) -> None:
    plain = said("translate", model, "--alignment", lines=LINES)
    assert len(plain) == len(LINES)
    assert plain[4] == plain[5] == " ||| "
    lists = said("translate", model, "--n-best", 3, lines=LINES)
    objects = [
        json.loads(line) for line in said("translate", model, "--n-best", 3, "--json", "--alignment", lines=LINES)
    ]
    assert [each["source"] for each in objects] == LINES
    expected = []
    for number, each in enumerate(objects):
        for found in each["translations"]:
            numbers = (f"log_probability= {found['log_probability']:.4f}", f"{found['score']:.4f}")
            expected.append(" ||| ".join([str(number), found["text"], *numbers]))
        best = each["translations"][0]
        assert plain[number] == f"{best['text']} ||| " + " ".join(f"{s}-{t}" for s, t in best["alignment"])
        assert [target for _, target in best["alignment"]] == list(range(len(best["text"].split())))
        assert all(source < len(each["source"].split()) for source, _ in best["alignment"])
    assert lists == expected
    assert len(lists) == 3 * 5 + 2


def test_prefixes_ensembles_samples_and_split_lines_reach_the_search(
    model: Path, other_model: Path, tmp_path: Path
) -> None:
    alone = said("translate", model, lines=LINES)
    (tmp_path / "prefixes").write_text("Die\n\n" + "\n" * 5, encoding="utf-8")
    begun = said("translate", model, "--prefix", tmp_path / "prefixes", lines=LINES)
    assert begun[0].startswith("Die")
    assert begun[1:] == alone[1:]
    assert said("translate", model, "--ensemble", model, lines=LINES) == alone
    assert said("translate", model, "--ensemble", other_model, lines=LINES) != alone
    drawn = said("translate", model, "--sampling", "--seed", 3, lines=LINES)
    assert drawn == said("translate", model, "--sampling", "--seed", 3, "--max-tokens", 20, lines=LINES)
    assert drawn != said("translate", model, "--sampling", "--seed", 4, lines=LINES)
    (joined,) = said(
        "translate", model, "--too-long", "split", "--max-source-tokens", 30, lines=[" ".join(SOURCES[:9])]
    )
    assert len(joined) > max(map(len, alone))


@pytest.mark.parametrize("search", [("--sampling", "--seed", 3), ("--beam", 5)])
def test_minimum_bayes_risk_takes_the_candidate_with_the_best_mean_chrf_against_the_others(model: Path, search) -> None:
    objects = [json.loads(line) for line in said("translate", model, *search, "--n-best", 5, "--json", lines=LINES)]
    expected = []
    for each in objects:
        texts = [found["text"] for found in each["translations"]]
        means = [
            sum(CHRF().sentence_score(text, [other]).score for m, other in enumerate(texts) if m != n)
            for n, text in enumerate(texts)
        ]
        best = max(means)
        expected.append(texts[next(n for n, mean in enumerate(means) if mean > best - 1e-6)])
    assert said("translate", model, *search, "--mbr", 5, lines=LINES) == expected
    assert expected != [each["translations"][0]["text"] for each in objects]
    (first, *_) = said("translate", model, *search, "--mbr", 5, "--json", lines=LINES)
    assert [found["text"] for found in json.loads(first)["translations"]] == expected[:1]


def test_minimum_bayes_risk_without_its_package_or_with_too_few_candidates_is_refused(model: Path, monkeypatch) -> None:
    assert "--mbr 4: writes one translation a line, of so many; drop --n-best 2" in refused(
        "translate", model, "--mbr", 4, "--n-best", 2, lines=LINES
    )
    assert "9 is above the beam, 4: a search gives at most as many translations as its beam, also to --mbr" in refused(
        "translate", model, "--mbr", 9, lines=LINES
    )
    monkeypatch.setattr("dist_transformer.cli.translate.find_spec", lambda name: None)
    assert "--mbr 4: needs the package fastchrf: pip install 'dist-transformer[mbr]'" in refused(
        "translate", model, "--mbr", 4, lines=LINES
    )


def test_lists_are_reranked_by_the_scores_of_another_program(model: Path, tmp_path: Path) -> None:
    lists = said("translate", model, "--n-best", 3, lines=["a ||| b", *LINES])
    (tmp_path / "lists").write_text("".join(f"{line}\n" for line in lists), encoding="utf-8")
    places = [line.split(" ||| ")[0] for line in lists]
    last = [n for n, place in enumerate(places) if places[n + 1 : n + 2] != [place]]

    def reranked(scores: list[object]) -> list[str]:
        (tmp_path / "scores").write_text("".join(f"{score}\n" for score in scores), encoding="utf-8")
        return said("rerank", tmp_path / "lists", tmp_path / "scores")

    assert reranked([0] * len(lists)) == said("translate", model, lines=["a ||| b", *LINES])
    texts = [" ||| ".join(line.split(" ||| ")[1:-2]) for line in lists]
    assert reranked([f"{-1 / (n + 1):.4e}" for n in range(len(lists))]) == [texts[n] for n in last]
    assert len(last) == 1 + len(LINES)
    worst = ["-7" if n in last else "-inf" for n in range(len(lists))]  # as `score --too-long lowest` writes it
    assert reranked(worst) == [texts[n] for n in last]
    for scores, message in (
        (
            ["1"] * (len(lists) - 1),
            f"scores: ends before line {len(lists)}; give each line a score",
        ),
        (["1"] * (len(lists) + 1), f"lists: ends before line {len(lists) + 1}; give each line a score"),
        (["nan"] * len(lists), "line 1: expected NUMBER ||| TEXT ||| log_probability= ... in"),
    ):
        (tmp_path / "scores").write_text("".join(f"{score}\n" for score in scores), encoding="utf-8")
        assert message in refused("rerank", tmp_path / "lists", tmp_path / "scores")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            [0, 0, 1, 0, 0, 1],
            "lists, line 4: expected 2 as the next number, got 0: translate numbers the lines of one input",
        ),
        ([0, 0, 2, 2], "lists, line 3: expected 1 as the next number, got 2: translate numbers the lines of one input"),
        ([2, 2, 3], "lists, line 1: expected 0 as the next number, got 2: translate numbers the lines of one input"),
    ],
    ids=["two lists in one file", "with a gap", "begun later"],
)
def test_a_file_that_is_not_the_lists_of_one_input_is_not_reranked(
    numbers: list[int], message: str, tmp_path: Path
) -> None:
    lists, scores = tmp_path / "lists", tmp_path / "scores"
    lists.write_text(
        "".join(f"{number} ||| a ||| log_probability= -1 ||| -1\n" for number in numbers), encoding="utf-8"
    )
    scores.write_text("1\n" * len(numbers), encoding="utf-8")
    assert message in refused("rerank", lists, scores)


def test_the_lists_of_several_models_for_one_input_are_merged_as_the_message_says(tmp_path: Path) -> None:
    for name in ("first", "second"):
        text = "".join(f"{n} ||| {name} {n} ||| log_probability= -1 ||| -1\n" for n in range(11) for _ in range(2))
        (tmp_path / name).write_text(text, encoding="utf-8")
    lists, scores = tmp_path / "lists", tmp_path / "scores"
    scores.write_text("1\n1\n1\n2\n" * 11, encoding="utf-8")
    lists.write_text(
        "".join((tmp_path / name).read_text(encoding="utf-8") for name in ("first", "second")), encoding="utf-8"
    )
    assert "merged by: sort -n -s LISTS" in refused("rerank", lists, scores)
    lists.write_bytes(
        subprocess.run(["sort", "-n", "-s", tmp_path / "first", tmp_path / "second"], stdout=-1, check=True).stdout
    )
    assert said("rerank", lists, scores) == [f"second {number}" for number in range(11)]


def test_lists_are_rescored_by_another_model_with_the_commands_of_the_page(
    model: Path, other_model: Path, tmp_path: Path
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "translate.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"(?:^    .+\n)+", page, re.MULTILINE) if "candidates.de" in each)
    lines = ["a ||| b", *LINES[3:]]
    (tmp_path / "input.en").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "my-first").symlink_to(model)
    (tmp_path / "runs" / "de-en").symlink_to(other_model)
    with quick_command(tmp_path, without(NOT_INHERITED)) as path:
        environment = {**without(NOT_INHERITED), "PATH": path}
        subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, env=environment, check=True)

    def written(name: str) -> list[str]:
        return (tmp_path / name).read_text(encoding="utf-8").split("\n")[:-1]

    objects = map(json.loads, said("translate", model, "--n-best", 8, "--beam", 8, "--json", lines=lines))
    found = [(number, each) for number, line in enumerate(objects) for each in line["translations"]]
    assert written("sources.en") == [lines[number] for number, _ in found]
    assert written("candidates.de") == [each["text"] for _, each in found]
    given = said("score", other_model, "--source", tmp_path / "candidates.de", "--target", tmp_path / "sources.en")
    sums = [float(line) for line in written("sums.txt")]
    assert sums == pytest.approx(
        [each["log_probability"] + float(score) for (_, each), score in zip(found, given, strict=True)], rel=1e-4
    )
    best = [
        max((place for place, (of, _) in enumerate(found) if of == number), key=sums.__getitem__)
        for number in range(len(lines))
    ]
    assert written("output.de") == [found[place][1]["text"] for place in best]


def test_a_plugin_is_refused_where_no_model_has_one(model: Path, other_model: Path, tmp_path: Path) -> None:
    lines, plugin = tmp_path / "lines", ("--plugin", "mine.py:build")
    lines.write_text("One .\n", encoding="utf-8")
    message = f"--plugin mine.py:build: {model} is a model of this program, without a plug-in; drop --plugin"
    assert refused("translate", model, "--ensemble", other_model, *plugin, lines=LINES) == message
    assert refused("translate", model, "--input", lines, "--output", tmp_path / "out", *plugin) == message
    assert refused("evaluate", model, "--source", lines, "--reference", lines, *plugin) == message
    for given in ((model, "--source", lines, "--engine", "ctranslate2"), ("--hypothesis", lines)):
        assert "--plugin: is the code of a model that" in refused("evaluate", *given, "--reference", lines, *plugin)


def test_ctranslate2_says_what_our_own_search_says(model: Path) -> None:
    pytest.importorskip("ctranslate2")
    greedy = ("--beam", 1)
    ours = said("translate", model, *greedy, lines=LINES)
    assert said("translate", model, *greedy, "--engine", "ctranslate2", lines=LINES) == ours
    assert "--ensemble: CTranslate2 searches with one model" in refused(
        "translate", model, "--ensemble", model, "--engine", "ctranslate2", lines=LINES
    )


def test_pairs_are_scored_by_line_and_by_token(model: Path, tmp_path: Path) -> None:
    for name, lines in (("source", LINES), ("target", LINES[::-1]), ("short", LINES[:2])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    pair = ("--source", tmp_path / "source", "--target", tmp_path / "target")
    sums = [float(line) for line in said("score", model, *pair)]
    tokens = [[float(value) for value in line.split()] for line in said("score", model, *pair, "--per-token")]
    objects = [json.loads(line) for line in said("score", model, *pair, "--json")]
    assert [sum(line) for line in tokens] == pytest.approx(sums, abs=0.01)
    assert [each["log_probability"] for each in objects] == pytest.approx(sums, abs=1e-4)
    assert [len(each["pieces"]) for each in objects] == [len(line) for line in tokens]
    whole = invoke("score", model, *pair).stderr
    assert f"7 pairs, {sum(map(len, tokens))} target tokens" in whole
    assert f"perplexity {np.exp(-sum(sums) / sum(map(len, tokens))):.2f}" in whole
    assert "short has 2 lines: expected files of as many" in refused(
        "score", model, *pair[:2], "--target", tmp_path / "short"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--n-best", 9), "n_best: 9 is above the beam, 4"),
        (("--top-k", 9), "top_k: is of sampling, which is off"),
        (("--sampling", "--top-p", 0), "top_p: input should be greater than 0; got 0.0 (float)"),
        (("--input", "absent"), "--input and --output belong together"),
        (("--input", "absent", "--output", "out"), "absent: cannot be read: No such file"),
        (("--prefix", "absent"), "absent: cannot be read: No such file"),
        (("--ranks", 2), "--ranks 2: processes share a file"),
        (("--too-long", "split", "--alignment"), "--too-long split: a line that is cut has no alignment"),
        (("--engine", "ctranslate2", "--alignment"), "--engine ctranslate2: alignment is read from"),
        (("--max-source-tokens", 5), "line 1: "),
        (("--sampling", "--no-sampling", "--top-k", 9), "top_k: is of sampling, which is off"),
    ],
)
def test_what_cannot_be_done_is_refused(options: tuple[object, ...], message: str, model: Path, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(StopRequest, "listen", lambda _: None)  # it would take over the signals of the tests
    assert message in refused("translate", model, *options, lines=LINES)


def test_models_of_different_tokenizers_are_no_ensemble(model: Path, tmp_path: Path) -> None:
    train_tokenizer(iter(SOURCES[:300]), TokenizerConfig(vocabulary_size=200), tmp_path / "two.model")
    other = make_model(tmp_path / "other", tmp_path / "two.model", 2)
    assert "models decode together only if their tokens are the same" in refused(
        "translate", model, "--ensemble", other
    )
