"""The only door to sacreBLEU: scores of a corpus with the signatures that make them comparable (Post, 2018)."""

import functools
import logging
import re
from collections.abc import Sequence

from sacrebleu.metrics import BLEU, CHRF

from dist_transformer.errors import DataError

log = logging.getLogger(__name__)

TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}
"""Of target languages that are written without spaces, or with few: those that sacreBLEU's command takes for them."""


def corpus_scores(
    hypotheses: Sequence[str], references: Sequence[str], target_language: str = ""
) -> dict[str, float | str]:
    """BLEU and chrF (0 to 100) of detokenized text with their signatures, and the share of exact matches (0 to 1).

    `target_language` decides BLEU's tokenizer, as in sacreBLEU's command: `zh`, `ja-mecab`, `ko-mecab`, `13a` for others.

    Raises DataError when there is nothing to score or the two sides differ in length.
    """
    if len(hypotheses) != len(references):
        raise DataError(
            f"{len(hypotheses)} translations cannot be scored against {len(references)} references: expected one "
            "reference a translation. Check that both come from the same lines."
        )
    if not references:
        raise DataError("There are no lines to score: expected at least one translation and its reference.")
    bleu, chrf = BLEU(tokenize=_tokenizer(target_language)), CHRF()
    matches = sum(ours.strip() == theirs.strip() for ours, theirs in zip(hypotheses, references, strict=True))
    return {
        "bleu": bleu.corpus_score(list(hypotheses), [list(references)]).score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": chrf.corpus_score(list(hypotheses), [list(references)]).score,
        "chrf_signature": str(chrf.get_signature()),
        "exact_match": matches / len(references),
    }


@functools.cache
def _tokenizer(target_language: str) -> str | None:
    """The name of BLEU's tokenizer; None: sacreBLEU's own default."""
    language = re.split("[-_]", target_language.lower())[0]
    wanted = TOKENIZERS.get(language)
    if wanted is None or wanted == "zh":
        return wanted
    try:
        BLEU(tokenize=wanted)
    except (ImportError, RuntimeError):
        log.warning(
            "BLEU counts characters (tok:char), as its tokenizer for %s, %s, is not there: pip install 'sacrebleu[%s]'",
            language,
            wanted,
            language,
        )
        return "char"
    return wanted
