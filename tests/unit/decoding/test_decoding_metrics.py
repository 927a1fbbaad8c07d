"""Scores are sacreBLEU's own."""

import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import sacrebleu
from sacremoses import MosesTokenizer

from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.decoding import metrics
from dist_transformer.decoding.metrics import corpus_scores, tokenised_scores

HYPOTHESES = ["The cat sat on the mat.", "A dog runs through the wet grass.", "Good morning!", "Hello there"]
REFERENCES = ["The cat sat on a mat.", "A dog runs through wet grass.", "Good morning!", "Hello, there"]


def test_scores_equal_sacrebleus_corpus_functions() -> None:
    scores = corpus_scores(HYPOTHESES, [REFERENCES])
    assert scores["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score


def test_signatures_name_the_tokenizer_and_the_version() -> None:
    scores = corpus_scores(HYPOTHESES, [REFERENCES])
    for part in ("nrefs:1", "case:mixed", "tok:13a", "smooth:exp", f"version:{sacrebleu.__version__}"):
        assert part in str(scores["bleu_signature"])
    for part in ("nrefs:1", "nc:6", "nw:0", f"version:{sacrebleu.__version__}"):
        assert part in str(scores["chrf_signature"])


def test_exact_match_is_the_share_of_equal_lines() -> None:
    assert corpus_scores(HYPOTHESES, [REFERENCES])["exact_match"] == 0.25
    assert corpus_scores(REFERENCES, [REFERENCES])["exact_match"] == 1.0


def test_a_perfect_translation_scores_100() -> None:
    scores = corpus_scores(REFERENCES, [REFERENCES])
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)


def spoilt(lines: list[str]) -> list[str]:
    """As a translation might be: words left out, repeated and exchanged, another punctuation."""
    drawn = random.Random(1)
    made = []
    for line in lines:
        words = [word for word in line.split() for _ in range(drawn.choice((0, 1, 1, 1, 1, 1, 2)))]
        if len(words) > 2 and drawn.random() < 0.3:
            words[0], words[-1] = words[-1], words[0]
        made.append(" ".join(words).replace(".", " .") if drawn.random() < 0.2 else " ".join(words))
    return made


@pytest.mark.parametrize("languages", ["en-de", "en-zh"])
def test_scores_and_signatures_are_those_of_the_sacrebleu_command(tmp_path: Path, languages: str) -> None:
    references = [target for _, (_, target) in zip(range(400), demo_pairs("test"), strict=False)]
    if languages == "en-zh":  # any text with Chinese characters in it
        references = [line.replace("e", "\u4e00").replace("i", "\u4e8c") for line in references]
    hypotheses = spoilt(references)
    for name, lines in (("hyp", hypotheses), ("ref", references)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "hyp", "-l", languages, "-m", "bleu", "chrf", "-w", "12"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    bleu, chrf = json.loads(out)
    ours = corpus_scores(hypotheses, [references], languages.split("-")[1])
    assert f"{ours['bleu']:.12f}" == f"{bleu['score']:.12f}"
    assert f"{ours['chrf']:.12f}" == f"{chrf['score']:.12f}"
    assert ours["bleu_signature"] == bleu["signature"]
    assert ours["chrf_signature"] == chrf["signature"]
    assert 5 < bleu["score"] < 95


@pytest.mark.parametrize(
    ("language", "tokenizer"), [("de", "13a"), ("", "13a"), ("zh", "zh"), ("zh_CN", "zh"), ("zho_Hans", "zh")]
)
def test_the_target_language_decides_the_tokenizer(language: str, tokenizer: str) -> None:
    assert f"tok:{tokenizer}|" in str(corpus_scores(HYPOTHESES, [REFERENCES], language)["bleu_signature"])


def test_of_text_without_spaces_under_another_language_it_is_said_once_that_13a_is_wrong(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics._tokenizer.cache_clear()
    for language in ("zh", "th", "th", "de"):
        lines = REFERENCES if language == "de" else ["\u4e00\u4e8c\uff0c\u4e09\u3002"]
        corpus_scores(lines, [lines], language)
    assert [record.getMessage() for record in caplog.records] == [
        "BLEU takes clauses for words (tok:13a): the target language is 'th'; zh, ja and ko have tokenizers of their own; "
        "of other languages without spaces read chrF"
    ]
    metrics._tokenizer.cache_clear()


def test_without_the_package_for_japanese_characters_are_counted_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    metrics._tokenizer.cache_clear()
    assert "tok:char|" in str(corpus_scores(HYPOTHESES, [REFERENCES], "ja")["bleu_signature"])
    assert "pip install 'sacrebleu[ja]'" in caplog.text
    metrics._tokenizer.cache_clear()


def papineni_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Papineni et al. (2002) on the words between spaces, one reference a line, as multi-bleu.perl has it."""
    precisions = []
    for order in range(1, 5):
        matched, total = 0, 0
        for ours, theirs in zip(hypotheses, references, strict=True):
            found, expected = (
                Counter(zip(*(line.split()[start:] for start in range(order)), strict=False)) for line in (ours, theirs)
            )
            matched += (found & expected).total()
            total += found.total()
        precisions.append(matched / total if total else 0.0)
    if 0.0 in precisions:
        return 0.0
    our_length, their_length = (sum(len(line.split()) for line in lines) for lines in (hypotheses, references))
    brevity = min(0.0, 1 - their_length / our_length)
    return 100 * math.exp(brevity + sum(map(math.log, precisions)) / 4)


def some_pairs() -> tuple[list[str], list[str]]:
    references = [target for _, (_, target) in zip(range(300), demo_pairs("test"), strict=False)]
    return spoilt(references), references


def test_bleu_of_tokenised_text_is_the_plain_formula_on_its_words() -> None:
    hypotheses, references = some_pairs()
    scores = tokenised_scores(hypotheses, [references], "spaces", "de")
    assert scores["bleu_tokenised"] == pytest.approx(papineni_bleu(hypotheses, references), abs=1e-9)
    assert 5 < float(scores["bleu_tokenised"]) < 95
    shorter = [line.rsplit(" ", 1)[0] for line in references]
    expected = papineni_bleu(shorter, references)
    assert expected < 90, "the brevity penalty counts"
    assert tokenised_scores(shorter, [references], "spaces")["bleu_tokenised"] == pytest.approx(expected, abs=1e-9)


def test_bleu_of_raw_text_is_that_of_moses_tokens() -> None:
    hypotheses, references = some_pairs()
    moses = MosesTokenizer("de")
    tokenised = [[moses.tokenize(line, return_str=True) for line in lines] for lines in (hypotheses, references)]
    scores = tokenised_scores(hypotheses, [references], "moses", "de_DE")
    assert scores["bleu_tokenised"] == pytest.approx(papineni_bleu(*tokenised), abs=1e-9)
    assert scores["bleu_tokenised"] != tokenised_scores(hypotheses, [references], "spaces")["bleu_tokenised"]
    assert "tok:moses-de-" in str(scores["bleu_tokenised_signature"])
    assert "smooth:none" in str(scores["bleu_tokenised_signature"])


def test_compounds_are_split_in_three_as_in_tensor2tensor() -> None:
    hypotheses = ["a rich-text format of one line", "well-to-do people are there too", "x-y-z"]
    references = ["a plain-text format of one line", "well-off people are there too", "x-y-z"]
    split = [
        [
            "a rich ##AT##-##AT## text format of one line",
            "well ##AT##-##AT## to ##AT##-##AT## do people are there too",
            "x ##AT##-##AT## y-z",
        ],
        [
            "a plain ##AT##-##AT## text format of one line",
            "well ##AT##-##AT## off people are there too",
            "x ##AT##-##AT## y-z",
        ],
    ]
    scores = tokenised_scores(hypotheses, [references], "moses", "en")
    assert scores["bleu_compound_split"] == pytest.approx(papineni_bleu(*split), abs=1e-9)
    assert scores["bleu_compound_split"] != scores["bleu_tokenised"]
    assert "-compounds|" in str(scores["bleu_compound_split_signature"])


def test_without_four_matching_words_tokenised_bleu_is_0() -> None:
    assert tokenised_scores(["a b c"], [["a b c"]], "spaces")["bleu_tokenised"] == 0
    assert tokenised_scores(["a b c x"], [["a b c d"]], "spaces")["bleu_tokenised"] == 0
