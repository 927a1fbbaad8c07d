"""The page about one run: one file with its history, data, scores, samples and figures.

It loads nothing, needs no script, and is made for phones, print and dark mode.
"""

import shlex
import time
from collections.abc import Iterator, Sequence

import numpy as np

from dist_transformer import __version__
from dist_transformer.format import duration
from dist_transformer.reporting.attention import SentenceAttention, attention_png
from dist_transformer.reporting.charts import Marks, Panel, marks_of, panels_of
from dist_transformer.reporting.figures import panel_svg
from dist_transformer.reporting.formatting import (
    NOTHING,
    evaluation_text,
    measure_name,
    measure_text,
    metric_name,
    moment,
    nodes_text,
    number,
    state_text,
    steps_text,
)
from dist_transformer.reporting.html import Content, Html, document, facts, html, picture, png, table, tag, together
from dist_transformer.reporting.run_history import RunStory
from dist_transformer.reporting.samples import samples_part
from dist_transformer.reporting.scores import EVALUATED, scores_part
from dist_transformer.reporting.tables import checkpoints_part, configuration_part, data_part, history_part

Part = tuple[str, str, Html]
NO_ATTENTION = "Not drawn."


def run_page(
    story: RunStory, attention: Sequence[tuple[SentenceAttention, bytes]] = (), attention_note: str = NO_ATTENTION
) -> str:
    """The page as HTML.

    Args:
        attention: sentences with their figures (attention.attention_png).
        attention_note: reason if there are none.
    """
    now = time.time()
    parts = [
        ("summary", "Summary", _summary(story, now)),
        ("scores", "Scores", scores_part(story)),
        ("curves", "Curves", _curves(story)),
        ("samples", "Samples", samples_part(story)),
        ("attention", "Attention", _attention(attention, attention_note)),
        ("data", "Data", data_part(story)),
        ("history", "History", history_part(story)),
        ("checkpoints", "Checkpoints", checkpoints_part(story)),
        ("configuration", "Configuration", configuration_part(story)),
    ]
    state = state_text(story, now)
    header = tag("p", tag("span", state, class_=f"state {story.view.state or ''}"), " ", _languages(story))
    return document(story.name, header, parts, footer(now))


def footer(now: float) -> str:
    return (
        f"Written {moment(now)} by Dist Transformer {__version__}. The page holds all that it shows and loads nothing."
    )


def pictures(panels: Sequence[Panel], marks: Marks) -> Html:
    """Small charts side by side, below each other on a narrow screen."""
    return tag("div", *(picture(panel_svg(panel, marks), panel.title) for panel in panels), class_="pictures")


def _languages(story: RunStory) -> str:
    source, target = (story.settings.get(f"data.{side}_language") for side in ("source", "target"))
    return f"{source} to {target}" if source and target else ""


def _summary(story: RunStory, now: float) -> Html:
    best, train = story.best, story.curves.newest.get("train", {})
    speed = story.curves.of("train", "tokens_per_second")
    values: list[tuple[str, Content]] = [("Steps", steps_text(story))]
    if best is not None:
        score = measure_text(best.measure, best.value)
        values.append((f"Best {metric_name(best.measure)} (step {best.step:,})", score))
    values += [
        (f"Evaluated: {name} {measure_name(key)} {evaluation_text(scores)}".strip(), measure_text(key, scores[key]))
        for name, scores in story.evaluations.items() for key in EVALUATED if key in scores
    ]  # fmt: skip
    values += [
        ("Training loss, last", number(train.get("loss"), ".4f")),
        ("Target tokens/s, median", number(float(np.median(speed.values))) if speed else NOTHING),
        ("Time in training", duration(story.trained_seconds)),
    ]
    rows = [[name, value] for name, value in _about(story, now) if value not in (None, "", NOTHING)]
    return together([facts(values), table(["", ""], rows)])


def _about(story: RunStory, now: float) -> Iterator[tuple[str, Content]]:
    run, newest = story.run, story.starts[-1].begun if story.starts else {}
    ranks = newest.get("num_ranks", run.get("num_ranks"))
    jobs = dict.fromkeys(str(start.begun["slurm_job_id"]) for start in story.starts if start.begun.get("slurm_job_id"))
    jobs |= dict.fromkeys(str(record["job"]) for record in story.attempts if record.get("job"))
    jobs |= {str(run["slurm_job_id"]): None} if run.get("slurm_job_id") else {}
    yield "State", state_text(story, now)
    yield "Why it ended", story.starts[-1].ended.get("reason") if story.starts else None
    yield "Folder", tag("code", str(story.run_dir.path.absolute()))
    yield "Started", moment(story.starts[0].begun.get("time")) if story.starts else None
    yield "Last record", moment(story.curves.newest.get("train", {}).get("time"))
    yield "Starts", number(len(story.starts) or run.get("starts"))
    yield "Machines", nodes_text(newest) if newest else run.get("host")
    yield "Ranks", f"{ranks} on {newest['device']}" if "device" in newest else ranks
    yield "Model", _model(story)
    yield "Parameters", number(story.num_parameters)
    yield "Precision", story.settings.get("training.precision")
    yield "Target tokens trained on", number(story.curves.newest.get("train", {}).get("total_target_tokens"))
    yield "Slurm jobs", ", ".join(jobs)
    yield "Test corpus", _not_evaluated(story)
    yield "MLflow", _mlflow(story)
    yield "Version", newest.get("version", run.get("version"))


def _model(story: RunStory) -> str | None:
    sizes = {key: story.settings.get(f"model.{key}") for key in ("preset", "d_model", "d_ff", "num_heads")}
    layers = [story.settings.get(f"model.num_{side}_layers") for side in ("encoder", "decoder")]
    if None in (*sizes.values(), *layers):
        return None
    preset, d_model, d_ff, heads = sizes.values()
    return f"{preset}: {layers[0]} + {layers[1]} layers, d_model {d_model}, d_ff {d_ff}, {heads} heads"


def _not_evaluated(story: RunStory) -> Content:
    """Command that evaluates a given test corpus that has no scores yet."""
    is_given = any(value for key, value in story.settings.items() if key.startswith("data.test."))
    if not is_given or "test" in story.evaluations:
        return None
    command = f"dist-transformer evaluate {shlex.quote(str(story.run_dir.path.absolute()))}"
    when = "" if story.run_dir.model.is_dir() else ", once the run has written its model"
    return together(["not evaluated yet: ", tag("code", command), when])


def _mlflow(story: RunStory) -> Content:
    address, run_id = story.view.mlflow_uri, story.view.mlflow_run_id
    if not run_id or not address:
        return None
    if address.startswith(("http://", "https://")):
        return tag("a", f"run {run_id}", href=f"{address.rstrip('/')}/#/runs/{run_id}", rel="noreferrer")
    show = f"dist-transformer ui {shlex.quote(str(story.run_dir.path.parent))}"
    return together([f"run {run_id} in ", tag("code", address), ": ", tag("code", show)])


def _curves(story: RunStory) -> Html:
    panels = panels_of(story)
    if not panels:
        return tag("p", "No step was recorded yet.")
    marks = marks_of(story)
    words = "Pale bands: the lowest and the highest value around each point. The first steps of a loss may lie above its picture."
    lines = [
        *([f"Dashed: restarts ({len(marks.restarts)})."] if marks.restarts else []),
        *([f"Dotted: divergences ({len(marks.divergences)})."] if marks.divergences else []),
    ]
    return together([tag("p", " ".join([words, *lines]), class_="soft"), pictures(panels, marks)])


def _attention(sentences: Sequence[tuple[SentenceAttention, bytes]], note: str) -> Html:
    if not sentences:
        return tag("p", note)
    words = (
        "All heads of all layers; darker is more, and each row of a map sums to 1. At the right the mean over the heads of "
        "the last layer: each row is the piece that is read or predicted, each column one that it looks at. A word begins at _."
    )
    return together([tag("p", words, class_="soft"), *(_one_attention(each, data) for each, data in sentences)])


def _one_attention(sentence: SentenceAttention, data: bytes) -> Html:
    alt = f"Attention weights of the model between “{sentence.source}” and “{sentence.translation}”, by layer and head"
    shown = tag("div", tag("div", png(data, alt), class_="photo wide"), class_="scroll", tabindex="0")
    return tag(
        "figure", tag("h3", sentence.source), shown, tag("figcaption", "Translation: ", html(sentence.translation))
    )


def drawn(sentences: Sequence[SentenceAttention]) -> list[tuple[SentenceAttention, bytes]]:
    """Each sentence with its figure."""
    return [(sentence, attention_png(sentence)) for sentence in sentences]
