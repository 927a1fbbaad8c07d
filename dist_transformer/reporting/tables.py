"""Tables of a run's page: its data, history, checkpoints and configuration."""

from collections.abc import Iterator
from typing import Any

from dist_transformer.format import duration
from dist_transformer.reporting.formatting import (
    NOTHING,
    measure_name,
    measure_text,
    metric_name,
    moment,
    nodes_text,
    number,
    setting_text,
)
from dist_transformer.reporting.html import Content, Html, details, png, table, tag, together
from dist_transformer.reporting.run_history import RunStory, SavedCheckpoint, Start, settings_that_differ
from dist_transformer.run.goodput import Goodput, rows_of

CHECKPOINT_MEASURES = ("bleu", "chrf", "comet", "loss", "perplexity")


def data_part(story: RunStory) -> Html:
    """The corpora as prepared: kept and dropped pairs, lengths of sentences."""
    prepared = story.prepared
    if prepared is None or not (prepared.report or prepared.digest):
        where = f" in {prepared.folder}" if prepared else ""
        return together([tag("p", f"The report of the prepared corpus is not there{where}."), _sources(story)])
    corpora: dict[str, dict[str, Any]] = prepared.report.get("corpora", {})
    parts: list[Content] = [_sources(story)]
    if corpora:
        parts += [_sizes(corpora), _dropped(corpora), _lengths(corpora)]
    if prepared.picture:
        alt = "Histogram: how many training pairs have each length in tokens, on the source and on the target side"
        parts.append(tag("figure", tag("div", png(prepared.picture, alt), class_="photo small")))
    parts += [tag("ul", *(tag("li", line) for line in _overlaps(prepared.report)))]
    digest = tag("p", "Prepared corpus ", tag("code", str(prepared.folder)), ", digest ", tag("code", prepared.digest))
    return together([*parts, digest])


def history_part(story: RunStory) -> Html:
    """Each start and its end, attempts of the Slurm job, divergences, excluded nodes."""
    parts = [
        _starts(story.starts) if story.starts else tag("p", "The run folder has no history of its starts."),
        _goodput(story.goodput) if story.goodput else None,
        _attempts(story) if story.attempts else None,
        _divergences(story) if story.view.divergences else None,
    ]
    excluded = story.view.excluded
    if excluded:
        parts += [
            tag("h3", "Nodes that the run keeps away from"),
            table(["node", "reason"], [[*each] for each in excluded.items()]),
        ]
    return together(parts)


def checkpoints_part(story: RunStory) -> Html:
    """The existing checkpoints, the newest first, with the measures at their steps."""
    found = sorted(story.checkpoints, key=lambda checkpoint: -checkpoint.step)
    if not found:
        return tag("p", "There is no checkpoint.")
    measured = [(checkpoint, _measures(story, checkpoint)) for checkpoint in found]
    wanted = dict.fromkeys([*CHECKPOINT_MEASURES, *([story.best.measure] if story.best else [])])
    keys = [key for key in wanted if any(key in measures for _, measures in measured)]
    rows = [
        [
            checkpoint.name,
            number(checkpoint.step),
            moment(checkpoint.time),
            number(checkpoint.num_ranks),
            *(measure_text(key, measures.get(key)) for key in keys),
        ]
        for checkpoint, measures in measured
    ]
    head = ["checkpoint", "step", "saved", "ranks", *map(measure_name, keys)]
    best = next(
        (n for n, each in enumerate(found) if story.best and each.step == story.best.step and not each.suffix), None
    )
    said = f"Best by {metric_name(story.best.measure)}: step {story.best.step:,}" if story.best else ""
    gone = "" if best is not None or not story.best else ", whose checkpoint is not there (any more)"
    return together([tag("p", f"{said}{gone}.") if said else None, table(head, rows, best_row=best)])


def configuration_part(story: RunStory) -> Html:
    """Settings that differ from the default, then every setting."""
    if not story.settings:
        return tag("p", "The run folder has no config.yaml that can be read.")
    differing = settings_that_differ(story.settings)
    rows = [[_key(key), setting_text(value), setting_text(default)] for key, (value, default) in differing.items()]
    every = [[_key(key), setting_text(value)] for key, value in story.settings.items()]
    return together(
        [
            table(
                ["setting", "value", "default"],
                rows,
                "What is not the default; sizes beside those of the model's preset",
            ),
            details(f"All {len(every)} settings", table(["setting", "value"], every)),
        ]
    )


def _key(key: str) -> Html:
    return tag("code", key)


def _sources(story: RunStory) -> Html:
    """Sources of the text in the configuration."""
    places = ("source", "target", "path", "hub", "demo")
    rows = [
        [key.removeprefix("data."), setting_text(value)]
        for key, value in story.settings.items()
        if key.startswith("data.") and key.rpartition(".")[2] in places and value is not None
    ]
    return table(["corpus", "read from"], rows) if rows else Html()


def _sizes(corpora: dict[str, dict[str, Any]]) -> Html:
    keys = ("read_rows", "rows", "source_tokens", "target_tokens")
    rows = [[name, *(number(each.get(key)) for key in keys)] for name, each in corpora.items()]
    return together(
        [tag("h3", "Pairs and tokens"), table(["corpus", "pairs read", "kept", "source tokens", "target tokens"], rows)]
    )


def _dropped(corpora: dict[str, dict[str, Any]]) -> Html:
    rules = [*dict.fromkeys(rule for each in corpora.values() for rule in each.get("dropped", {}))]
    rows = [[name, *(number(each.get("dropped", {}).get(rule)) for rule in rules)] for name, each in corpora.items()]
    return together(
        [tag("h3", "Pairs dropped, by rule"), table(["corpus", *(rule.replace("_", " ") for rule in rules)], rows)]
    )


def _lengths(corpora: dict[str, dict[str, Any]]) -> Html:
    found = [
        (f"{name}, {side}", each[f"{side}_lengths"])
        for name, each in corpora.items()
        for side in ("source", "target")
        if isinstance(each.get(f"{side}_lengths"), dict)
    ]
    shares = [*dict.fromkeys(share for _, lengths in found for share in lengths)]
    head = [
        "corpus",
        *("longest" if share == "100" else f"{share} %" if share.isdecimal() else share for share in shares),
    ]
    rows = [[name, *(f"{lengths.get(share, NOTHING):,}" for share in shares)] for name, lengths in found]
    words = "So many percent of the sentences are not longer; the end of sentence counts"
    return together([tag("h3", "Lengths in tokens"), table(head, rows, words)])


def _overlaps(report: dict[str, Any]) -> Iterator[str]:
    if of_pairs := report.get("compared_pairs"):
        yield f"Training: {report.get('repeated_pairs', 0):,} of {of_pairs:,} pairs repeat another one."
    for name, overlap in report.get("overlap", {}).items():
        if "problem" in overlap:
            yield f"{name}: not compared with the training corpus: {overlap['problem']}"
        else:
            yield (
                f"{name}: {overlap['pairs']:,} of {overlap['of_pairs']:,} pairs are in the training corpus too, and the "
                f"sources of {overlap['sources']:,}."
            )


def _starts(starts: list[Start]) -> Html:
    rows = [
        [
            str(count),
            moment(start.begun.get("time")),
            number(start.step),
            f"{start.begun.get('num_ranks', NOTHING)} ({start.begun.get('device', NOTHING)})",
            nodes_text(start.begun),
            str(start.begun.get("slurm_job_id") or NOTHING),
            moment(start.ended.get("time")),
            number(start.ended.get("step")),
            _end(start, is_newest=count == len(starts)),
            str(start.begun.get("version", NOTHING)),
        ]
        for count, start in enumerate(starts, start=1)
    ]
    head = ["start", "began", "from step", "ranks", "nodes", "Slurm job", "ended", "at step", "how", "version"]
    return table(head, rows)


def _end(start: Start, *, is_newest: bool) -> str:
    if not start.ended:
        return "no end was recorded: running, or killed" if is_newest else "no end was recorded: killed"
    reason = start.ended.get("reason")
    return f"{start.ended.get('state', NOTHING)}" + (f": {reason}" if reason else "")


def _goodput(goodput: Goodput) -> Html:
    rows = [
        [words, duration(seconds), f"{share:.1%}", f"{hours:,.2f}"] for words, seconds, share, hours in rows_of(goodput)
    ]
    rows.append(["all", duration(goodput.total), "100.0%", f"{sum(goodput.rank_seconds.values()) / 3600:,.2f}"])
    head = ["where the time went", "wall time", "share", "hours of ranks"]
    return together(
        [tag("h3", "Goodput"), table(head, rows, "Since the first submission; communication is part of the steps")]
    )


def _attempts(story: RunStory) -> Html:
    rows = [
        [
            str(record.get("job", NOTHING)),
            str(record.get("attempt", NOTHING)),
            moment(record.get("time")),
            str(record.get("event", "")),
            nodes_text(record) if "nodes" in record else NOTHING,
            number(record.get("exit_code")),
            str(record.get("reason") or NOTHING),
            str(record.get("newest") or NOTHING),
        ]
        for record in story.attempts
    ]
    head = ["job", "attempt", "time", "event", "nodes", "exit code", "what followed", "newest checkpoint"]
    return together([tag("h3", "Attempts of the Slurm job"), table(head, rows)])


def _divergences(story: RunStory) -> Html:
    rows = [
        [
            number(event.get("since_step")),
            moment(event.get("time")),
            str(event.get("reason", "")),
            str(event.get("policy", NOTHING)),
            number(event.get("went_on_from")),
        ]
        for event in story.view.divergences
    ]
    head = ["since step", "noticed", "why", "policy", "resumed from step"]
    return together([tag("h3", "Divergences"), table(head, rows)])


def _measures(story: RunStory, checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """Measures in the checkpoint's state, or in metrics.jsonl at its step."""
    if checkpoint.measures:
        return checkpoint.measures
    found = {key: story.curves.of("validation", key) for key in CHECKPOINT_MEASURES}
    return {
        key: float(curve.values[place[0]])
        for key, curve in found.items()
        if curve is not None and len(place := (curve.steps == checkpoint.step).nonzero()[0])
    }
