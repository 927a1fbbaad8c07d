"""Formatting of numbers, times and names on pages."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from dist_transformer.config.metrics import MEASURES, TRANSLATION_MEASURES
from dist_transformer.reporting.run_history import Record, RunStory
from dist_transformer.run.evaluations import search_text

NOTHING = "-"


def measure_name(measure: str) -> str:
    """Display name: BLEU for bleu, newstest2013 BLEU for newstest2013/bleu."""
    corpus, _, key = measure.rpartition("/")
    return f"{corpus} {MEASURES[key].name if key in MEASURES else key.replace('_', ' ')}".strip()


def metric_name(measure: str) -> str:
    """Display name: validation BLEU for bleu, newstest2013 BLEU for newstest2013/bleu."""
    return measure_name(measure if "/" in measure else f"validation/{measure}")


def scores_text(scores: Mapping[str, Any]) -> str:
    """Returns the main measures of data.validation among those of a record."""
    there = [key for key in ("loss", "perplexity", *TRANSLATION_MEASURES) if key in scores]
    return ", ".join(f"{measure_name(key)} {measure_text(key, scores[key])}" for key in there)


def measure_text(measure: str, value: Any) -> str:
    """A measure's value with its significant digits; "-" without a value."""
    key = measure.rpartition("/")[2]
    return number(value, MEASURES[key].form if key in MEASURES else ".4f").replace("%", " %")


def evaluation_text(scores: Record) -> str:
    """Conditions of a score of the final model: (beam 4, 1,000 pairs, step 20)."""
    pairs, step = number(scores.get("pairs")), number(scores.get("step"))
    said = [
        search_text(scores),
        "" if pairs == NOTHING else f"{pairs} pairs",
        "" if step == NOTHING else f"step {step}",
    ]
    known = ", ".join(filter(None, said))
    return f"({known})" if known else ""


def number(value: Any, form: str = ",.0f") -> str:
    """Formats 12345 as 12,345; "-" if not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NOTHING
    return format(value, form) if math.isfinite(value) else str(value)


def moment(seconds: Any) -> str:
    """Formats unix seconds as 2026-11-22 03:38 UTC."""
    if not isinstance(seconds, int | float) or not seconds:
        return NOTHING
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def setting_text(value: Any) -> str:
    """A setting as in YAML: true, none, [a, b]."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(setting_text, value))}]" if isinstance(value, list | tuple) else str(value)


def state_text(story: RunStory, now: float) -> str:
    """State of the run; "running" in run.json is qualified if no rank has a recent heartbeat."""
    state = story.view.state or "not started"
    if state in ("starting", "running") and not story.view.is_alive(now):
        return f"{state}, but no rank gives a sign of life"
    return state


def steps_text(story: RunStory) -> str:
    """Progress like "400 of 1,000"."""
    most = story.settings.get("training.max_steps")
    return f"{story.view.step:,} of {most:,}" if isinstance(most, int) else f"{story.view.step:,}"


def nodes_text(record: Record) -> str:
    nodes = record.get("nodes")
    return ", ".join(map(str, nodes)) if isinstance(nodes, list) else str(nodes or NOTHING)


def model_text(settings: Mapping[str, Any]) -> str | None:
    """The model's preset and sizes; None if they are not all known."""
    names = ("preset", "num_encoder_layers", "num_decoder_layers", "d_model", "d_ff", "num_heads")
    sizes = [settings.get(f"model.{name}") for name in names]
    text = "{}: {} + {} layers, d_model {}, d_ff {}, {} heads"
    return None if None in sizes else text.format(*sizes)
