"""Adapter of sacreBLEU and sacremoses: scores of a corpus with signatures that make them comparable (Post, 2018)."""

import functools
import logging
import re
from collections.abc import Sequence
from importlib.metadata import version

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from dist_transformer.config.data_checks import language_code
from dist_transformer.config.metrics import Words
from dist_transformer.decoding.long_lines import without_spaces

log = logging.getLogger(__name__)

TOKENIZERS = {**dict.fromkeys(("zh", "zho", "chi", "cmn", "yue"), "zh"), **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
              **dict.fromkeys(("ko", "kor"), "ko-mecab")}  # fmt: skip
"""Tokenizers of target languages written without spaces, or with few, as in sacreBLEU's command."""


def corpus_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], target_language: str = ""
) -> dict[str, float | str]:
    """BLEU and chrF (0 to 100) of detokenized text with their signatures, and the share of exact matches (0 to 1).

    `references`: one or more translations of the same lines, at least one; a match with any of them counts.
    `target_language` selects BLEU's tokenizer, as in sacreBLEU's command: `zh`, `ja-mecab`, `ko-mecab`, else `13a`.
    """
    text = "".join(references[0][:100])
    tokenizer = _tokenizer(target_language, sum(map(without_spaces, text)) > len(text) / 2)
    bleu, chrf = BLEU(tokenize=tokenizer), CHRF()
    rows = zip(hypotheses, *references, strict=True)
    matches = sum(ours.strip() in {each.strip() for each in theirs} for ours, *theirs in rows)
    return {
        "bleu": bleu.corpus_score(hypotheses, references).score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": chrf.corpus_score(hypotheses, references).score,
        "chrf_signature": str(chrf.get_signature()),
        "exact_match": matches / len(hypotheses),
    }


def bleu_p_values(
    systems: Sequence[Sequence[str]], references: Sequence[Sequence[str]], target_language: str = ""
) -> list[float | None]:
    """p-values of each system's BLEU against the first one's: how likely so large a difference is between equally good
    systems; None for the first.

    By paired bootstrap resampling (Koehn, 2004), 1,000 samples, as `sacrebleu --paired-bs` does it with its usual seed.
    """
    named = [(str(number), list(lines)) for number, lines in enumerate(systems)]
    # force: what is to be said of tokenized text came with the scores
    metrics = {"BLEU": BLEU(tokenize=_tokenizer(target_language), force=True)}
    _, found = PairedTest(named, metrics, [list(lines) for lines in references], "bs", n_samples=1000)()
    first, *others = found["BLEU"]
    # A difference of 0 has 0.001 in sacreBLEU 2.6 if it is 0 in all samples: none of them is then above it.
    return [None, *(1.0 if other.score == first.score else other.p_value for other in others)]


def tokenised_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], words: Words, target_language: str = ""
) -> dict[str, float | str]:
    """BLEU (0 to 100) as computed before sacreBLEU, with signatures: Moses' multi-bleu.perl on tokenised text.

    `bleu_tokenised` uses the words unchanged; `bleu_compound_split` splits "rich-text" into three, as in
    tensor2tensor's get_ende_bleu.sh, which computed the English-German figures of Vaswani et al. (2017). With `words`
    "moses" both sides are tokenised here, by the rules of `target_language` (English ones if Moses has none);
    with "spaces" they are assumed to be tokenised.
    """
    texts, name = [[*lines] for lines in (hypotheses, *references)], "spaces"
    if words == "moses":
        from sacremoses import MosesTokenizer  # compiles hundreds of expressions: about half a second

        language = language_code(target_language) or "en"
        moses = MosesTokenizer(language)
        texts = [[moses.tokenize(line, return_str=True) for line in lines] for lines in texts]
        name = f"moses-{language}-{version('sacremoses')}"
    # "rich-text format" becomes "rich ##AT##-##AT## text format"; of "a-b-c" the first hyphen only, as by that script.
    split = [[re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line) for line in lines] for lines in texts]
    return _multi_bleu("bleu_tokenised", texts, name) | _multi_bleu("bleu_compound_split", split, f"{name}-compounds")


def _multi_bleu(key: str, texts: Sequence[list[str]], tokens: str) -> dict[str, float | str]:
    """BLEU of multi-bleu.perl for words between spaces, not rounded: no smoothing, 0 if no four words match; by `key`, and
    its signature, sacreBLEU's with `tokens` as the name of the tokenizer. `texts`: hypotheses, then references."""
    bleu = BLEU(tokenize="none", smooth_method="none", force=True)  # force: tokenised text is intended here
    score = bleu.corpus_score(texts[0], texts[1:]).score
    return {key: score, f"{key}_signature": str(bleu.get_signature()).replace("tok:none", f"tok:{tokens}")}


@functools.cache
def _tokenizer(target_language: str, has_no_spaces: bool = False) -> str | None:
    """Name of BLEU's tokenizer; None: sacreBLEU's default, of which a warning says, once, that it needs spaces."""
    language = language_code(target_language)
    if (wanted := TOKENIZERS.get(language)) is None:
        if has_no_spaces:
            known = "zh, ja and ko have tokenizers of their own; of other languages without spaces read chrF"
            log.warning("BLEU takes clauses for words (tok:13a): the target language is %r; %s", target_language, known)
        return None
    try:
        BLEU(tokenize=wanted)
    except (ImportError, RuntimeError):
        lacks = f"as its tokenizer for {language}, {wanted}, is not there: pip install 'sacrebleu[{wanted[:2]}]'"
        log.warning("BLEU counts characters (tok:char), %s", lacks)
        return "char"
    return wanted
