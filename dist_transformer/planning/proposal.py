"""Settings proposed for a corpus, which `init` writes with the reasons that its template has. Pure functions.

Recipes are those of runs that were measured (docs/reproduce.md) or of the paper; vocabulary and steps follow the text.
"""

import math
from typing import Any

from dist_transformer.config.schema import PRESETS
from dist_transformer.planning.step_time import FILLED_SHARE

Sections = dict[str, dict[str, Any]]
KEYS = ("below", "origin", "dropout", "vocabulary", "lanes", "max_tokens", "max_steps", "epochs", "warmup_steps",
        "learning_rate", "average_last")  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    preset: {"preset": preset, **dict(zip(KEYS, values, strict=True))}
    for preset, values in {
        "tiny": (1e5, "configs/multi30k_fast.yaml", 0.25, 10_000, 2, 4096, 3500, 35, 200, 0.01, 5),
        "small": (1e6, "configs/tatoeba_fast.yaml", 0.1, 8000, 2, 8192, 15_000, 25, 200, 0.006, 5),
        "base": (2e7, "base of the paper", 0.1, 32_000, 8, 6720, 100_000, 40, 4000, None, 5),
        "big": (math.inf, "big of the paper, en-fr", 0.1, 32_000, 8, 6720, 300_000, 40, 4000, None, 20),
    }.items()
}
"""Settings by preset, and the number of pairs below which it is proposed; `epochs` limits the steps on less text."""
TOKENS_A_PIECE = 150
"""Tokens of both sides for each piece of the vocabulary: 29,000 captions and 6,000 pieces have about as many."""
ESTIMATED_PIECES, RATIO_POWER = 6000, 0.23
"""Tokens are estimated for so many pieces; the power is fitted to Multi30k and newstest with 130 to 3,800 pieces."""
MANY_CHARACTERS = 1000
"""Above so many different characters rare ones get no piece, as sentencepiece advises for Chinese and Japanese."""


def preset_for(pairs: int) -> str:
    """The size of model for so many training pairs."""
    return next(preset for preset in PRESETS if pairs < RECIPES[preset]["below"])


def steps_per_epoch(preset: str, tokens: float) -> float:
    """Steps for so many tokens, both sides counted."""
    return float(tokens / (RECIPES[preset]["lanes"] * RECIPES[preset]["max_tokens"] * FILLED_SHARE))


def token_ratio(pieces: int) -> float:
    """Tokens of a text with so many pieces, as a multiple of the estimate."""
    return float(max(1.0, (ESTIMATED_PIECES / pieces) ** RATIO_POWER))


def proposed(preset: str, tokens: float, long_tokens: int, characters: int, max_steps: int | None = None) -> Sections:
    """Sections of a configuration, without files.

    Args:
        tokens: estimated tokens of the text, both sides; `long_tokens`: of a side that 1 in 100 exceeds.
        characters: number of different characters.
        max_steps: in place of the proposed number.
    """
    recipe = RECIPES[preset]
    pieces = min(recipe["vocabulary"], max(2 * characters + 8, rounded(max(10, tokens / TOKENS_A_PIECE))))
    tokens, long_tokens = tokens * token_ratio(pieces), math.ceil(long_tokens * token_ratio(pieces))
    by_epochs = max(200, rounded(recipe["epochs"] * steps_per_epoch(preset, tokens)))
    steps = max_steps or min(recipe["max_steps"], by_epochs)
    warmup, every = min(recipe["warmup_steps"], max(1, steps // 4)), max(1, min(25, steps // 10), steps // 50)
    peak, shorter = recipe["learning_rate"], warmup / recipe["warmup_steps"]
    rate = peak and rounded(peak * shorter**0.25)
    is_fast = peak is not None  # not the paper's
    longest = min(256, max(64, 32 * math.ceil(long_tokens / 16)))
    average = min(recipe["average_last"], max(1, steps // 5 // every))  # of a short run too the last fifth at most
    return {
        "data": {"filters": {"max_tokens": longest}, "lanes": recipe["lanes"], "max_tokens": recipe["max_tokens"]},
        "tokenizer": {"vocabulary_size": pieces, "character_coverage": 0.9995 if characters > MANY_CHARACTERS else 1.0},
        "model": {"preset": preset, "dropout": recipe["dropout"]}
        | ({"norm": "pre", "positions": "rotary"} if is_fast else {}),
        "optimizer": {"learning_rate": rate, **({"matrices": "muon"} if is_fast else {})},
        "schedule": {"warmup_steps": warmup, **({"name": "cosine"} if is_fast else {})},
        "training": {"max_steps": steps, "log_every_steps": min(50, max(1, steps // 20))},
        "validation": {"every_steps": 2 * every, "max_sentences": 500},
        "checkpoints": {"every_steps": every, "keep_last": max(10, average), "average_last": average},
    }


def rounded(number: float) -> Any:
    """The number with two significant digits, whole from 10 on."""
    digits = 1 - math.floor(math.log10(number))
    return round(number, digits) if digits > 0 else int(round(number, digits))
