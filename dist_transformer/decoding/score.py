"""The only door to sacreBLEU: scores of a corpus with the signatures that make them comparable (Post, 2018)."""

from collections.abc import Sequence

from sacrebleu.metrics import BLEU, CHRF

from dist_transformer.errors import DataError


def corpus_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float | str]:
    """BLEU and chrF (0 to 100) of detokenized text with their signatures, and the share of exact matches (0 to 1).

    Raises DataError when there is nothing to score or the two sides differ in length.
    """
    if len(hypotheses) != len(references):
        raise DataError(
            f"{len(hypotheses)} translations cannot be scored against {len(references)} references: expected one "
            "reference a translation. Check that both come from the same lines."
        )
    if not references:
        raise DataError("There are no lines to score: expected at least one translation and its reference.")
    bleu, chrf = BLEU(), CHRF()
    matches = sum(ours.strip() == theirs.strip() for ours, theirs in zip(hypotheses, references, strict=True))
    return {
        "bleu": bleu.corpus_score(list(hypotheses), [list(references)]).score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": chrf.corpus_score(list(hypotheses), [list(references)]).score,
        "chrf_signature": str(chrf.get_signature()),
        "exact_match": matches / len(references),
    }
