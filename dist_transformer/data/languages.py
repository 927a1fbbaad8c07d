"""Language of a sentence, one of the two declared ones, by py3langid or lingua."""

import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from dist_transformer.config.data_checks import language_code
from dist_transformer.errors import DataError

IsOther = Callable[[Sequence[str]], list[bool]]
"""Returns True for each sentence that is rather in the other language than in the one it should be in."""


def detector(rule: str, language: str, other: str) -> IsOther:
    """Returns the detector of a rule, `language` or `lingua`; DataError if it is not installed, or lacks a language."""
    codes = language_code(language), language_code(other)
    find, known = (_py3langid if rule == "language" else _lingua)(*codes)
    if unknown := [code for code in codes if code not in known]:
        raise DataError(
            f"data.filters.rules.{rule}: does not know the language {unknown[0]!r} of data.source_language or "
            f"data.target_language, but {', '.join(sorted(known))}. Correct the language, or set the rule to false"
        )
    return lambda texts: [found == codes[1] for found in find(texts)]


@cache
def _py3langid(language: str, other: str) -> tuple[Callable[[Sequence[str]], list[str | None]], set[str]]:
    """Returns the answers of `LanguageIdentifier.classify` for these two languages, and all that it knows.

    It is a naive Bayes classifier of byte sequences that an automaton finds. Here the automaton reads all sentences at once,
    a byte of each in a step, which is several times as fast.
    """
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    model = LanguageIdentifier.from_model_file(MODEL_FILE)
    next_state, output = np.asarray(model.tk_nextmove), np.asarray(model.tk_output, np.int64)
    first_move = np.asarray(model.tk_row, np.int64) << 8
    columns = [n for n, name in enumerate(model.nb_classes) if name in (language, other)]  # a language may have several
    weights, priors = model.nb_ptc[:, columns].astype(np.float32).T, model.nb_pc[columns]
    names = [model.nb_classes[n] for n in columns]

    def find(texts: Sequence[str]) -> list[str | None]:
        lowered = (text.lower() if text.isupper() else text for text in texts)
        encoded = [unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass") for text in lowered]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        order = np.argsort(-lengths, kind="stable")
        begins, longest_first = (np.cumsum(lengths) - lengths)[order], -lengths[order]
        text, state = np.frombuffer(b"".join(encoded), np.uint8), np.zeros(len(texts), np.int64)
        found = [np.empty(0, np.int64)]
        for place in range(int(lengths.max(initial=0))):
            active = int(np.searchsorted(longest_first, -place))
            state = next_state[first_move[state[:active]] + text[begins[:active] + place]]
            features = output[state]
            found.append((order[:active] * len(output) + features)[features >= 0])
        seen, counts = np.unique(np.concatenate(found), return_counts=True)
        rows, features = seen // len(output), seen % len(output)
        strength, size = np.log1p(counts.astype(np.float32)), len(texts)
        scores = [
            np.bincount(rows, strength * each[features], size) + prior
            for each, prior in zip(weights, priors, strict=True)
        ]
        has_features = np.bincount(rows, minlength=size) > 0
        best = np.argmax(scores, axis=0)
        return [names[n] if known else None for n, known in zip(best.tolist(), has_features.tolist(), strict=True)]

    return find, {*model.labels}


@cache
def _lingua(language: str, other: str) -> tuple[Callable[[Sequence[str]], list[str | None]], set[str]]:
    try:
        from lingua import Language, LanguageDetectorBuilder
    except ImportError as error:
        raise DataError(
            f"data.filters.rules.lingua: needs the package lingua ({error}): pip install 'dist-transformer[lingua]', or "
            "take the rule `language`, which needs no other package"
        ) from error
    codes: dict[str, Any] = {each.iso_code_639_1.name.lower(): each for each in Language.all()}
    languages = [codes[code] for code in (language, other) if code in codes]
    model = LanguageDetectorBuilder.from_languages(*(languages if len(languages) == 2 else codes.values())).build()

    def find(texts: Sequence[str]) -> list[str | None]:
        found = model.detect_languages_in_parallel_of([*texts])
        return [each and each.iso_code_639_1.name.lower() for each in found]

    return find, {*codes}
