"""Scores are sacreBLEU's own."""

import pytest
import sacrebleu

from dist_transformer.decoding.score import corpus_scores
from dist_transformer.errors import DataError

HYPOTHESES = ["The cat sat on the mat.", "A dog runs through the wet grass.", "Good morning!", "Hello there"]
REFERENCES = ["The cat sat on a mat.", "A dog runs through wet grass.", "Good morning!", "Hello, there"]


def test_scores_equal_sacrebleus_corpus_functions() -> None:
    scores = corpus_scores(HYPOTHESES, REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score


def test_signatures_name_the_tokenizer_and_the_version() -> None:
    scores = corpus_scores(HYPOTHESES, REFERENCES)
    for part in ("nrefs:1", "case:mixed", "tok:13a", "smooth:exp", f"version:{sacrebleu.__version__}"):
        assert part in str(scores["bleu_signature"])
    for part in ("nrefs:1", "nc:6", "nw:0", f"version:{sacrebleu.__version__}"):
        assert part in str(scores["chrf_signature"])


def test_exact_match_is_the_share_of_equal_lines() -> None:
    assert corpus_scores(HYPOTHESES, REFERENCES)["exact_match"] == 0.25
    assert corpus_scores(REFERENCES, REFERENCES)["exact_match"] == 1.0


def test_a_perfect_translation_scores_100() -> None:
    scores = corpus_scores(REFERENCES, REFERENCES)
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)


def test_sides_of_different_length_are_named_with_their_lengths() -> None:
    with pytest.raises(DataError, match=r"4 translations .* 3 references"):
        corpus_scores(HYPOTHESES, REFERENCES[:3])


def test_nothing_to_score_is_said() -> None:
    with pytest.raises(DataError, match="no lines to score"):
        corpus_scores([], [])
