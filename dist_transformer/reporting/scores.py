"""The section of scores: measures, their corpora and signatures, and the best validation."""

from collections.abc import Iterator

from dist_transformer.config.metrics import TOKEN_MEASURES, TRANSLATION_MEASURES, corpus_and_measure
from dist_transformer.reporting.formatting import NAMES, NOTHING, measure_name, measure_text, number, search_text
from dist_transformer.reporting.html import Html, details, table, tag, together
from dist_transformer.reporting.run_history import RunStory

MEASURES = ("bleu", "chrf", "comet", "loss", "perplexity", "token_accuracy", "nll")
EVALUATED = TRANSLATION_MEASURES
"""Measures of `evaluate` that are shown."""
FEW_ROWS = 12
"""Tables with at most so many rows are not folded."""
NEWEST_ROWS = 5
"""Rows shown of a longer table, besides the best."""


def scores_part(story: RunStory) -> Html:
    """The section of scores of a page."""
    parts = [_evaluations(story)] if story.evaluations else []
    parts += [_validations(story, corpus) for corpus in validation_corpora(story)]
    return together([*parts, _signatures(story)]) if parts else tag("p", "Nothing was validated or evaluated yet.")


def validation_corpora(story: RunStory) -> list[str]:
    """The prefixes of the measures: "" for data.validation, "newstest2013/" for a further one."""
    names = story.curves.names("validation")
    return [*dict.fromkeys(name.rpartition("/")[0] + "/" * ("/" in name) for name in names if name.endswith(MEASURES))]


def _translated(story: RunStory, corpus: str) -> str:
    """Conditions of a validation's translations from the settings: greedy search, of the first 500 sentences."""
    search = search_text(story.settings.get("validation.beam_size"))
    most = story.settings.get("validation.max_sentences")
    rows = _num_rows(story, corpus)
    is_part = isinstance(most, int) and (rows is None or most < rows)
    return f"{search}, of the first {most:,} sentences" if search and is_part else f"{search}, of all sentences"


def _num_rows(story: RunStory, corpus: str) -> int | None:
    """Number of pairs of data.validation as prepared; those of further corpora are not counted there."""
    corpora = story.prepared.report.get("corpora", {}) if story.prepared and not corpus else {}
    rows = corpora.get("validation", {}).get("rows")
    return rows if isinstance(rows, int) else None


def _evaluations(story: RunStory) -> Html:
    measures = [key for key in EVALUATED if any(key in scores for scores in story.evaluations.values())]
    rows = [
        [
            name,
            number(scores.get("pairs")),
            number(scores.get("beam_size")),
            *(measure_text(key, scores.get(key)) for key in measures),
            f"{100 * float(scores['exact_match']):.2f} %" if "exact_match" in scores else NOTHING,
        ]
        for name, scores in story.evaluations.items()
    ]
    head = ["corpus", "pairs", "beam", *map(measure_name, measures), "exact"]
    return together([tag("h3", "The final model, evaluated"), table(head, rows)])


def _validations(story: RunStory, corpus: str) -> Html:
    """All validations of a corpus, step by step, with the best one marked if validation.metric is of this corpus."""
    curves = {key: curve for key in MEASURES if (curve := story.curves.of("validation", corpus + key)) is not None}
    by_step = {
        key: dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) for key, curve in curves.items()
    }
    steps = sorted({step for values in by_step.values() for step in values})
    rows = [[number(step), *(measure_text(key, by_step[key].get(step)) for key in curves)] for step in steps]
    best_step = _best_step(story, corpus)
    best = steps.index(best_step) if best_step in steps else None
    title = f"Validation on {corpus.rstrip('/')}" if corpus else "Validation"
    said = tag("p", " ".join(_about(story, corpus, list(curves))), class_="soft")
    head = ["step", *map(measure_name, curves)]
    whole = table(head, rows, best_row=best)
    if len(rows) <= FEW_ROWS:
        return together([tag("h3", title), said, whole])
    few = sorted({*range(len(rows) - NEWEST_ROWS, len(rows)), *([] if best is None else [best])})
    short = table(head, [rows[place] for place in few], best_row=None if best is None else few.index(best))
    return together([tag("h3", title), said, short, details(f"All {len(rows)} validations", whole)])


def _best_step(story: RunStory, corpus: str) -> float | None:
    """The best step, if it is that of a measure of this corpus."""
    best = story.best
    if best is None or corpus_and_measure(best.measure)[0] != (corpus.rstrip("/") or None):
        return None
    return best.step


def _about(story: RunStory, corpus: str, measures: list[str]) -> Iterator[str]:
    """Yields the best step, and the data on which the numbers were measured."""
    best = story.best
    if best is not None and _best_step(story, corpus) is not None:
        yield f"Best by {measure_name(corpus_and_measure(best.measure)[1])}: step {best.step:,}."
    translated = [key for key in measures if key in TRANSLATION_MEASURES]
    if translated and search_text(story.settings.get("validation.beam_size")):
        yield f"{_listed(translated)}: {_translated(story, corpus)} (validation.beam_size, max_sentences)."
    of_tokens = [key for key in measures if key in TOKEN_MEASURES]
    if of_tokens:
        smoothed = "; the loss is that of smoothed labels" if "loss" in of_tokens else ""
        yield f"{_listed(of_tokens)}: of the references of the whole corpus{smoothed}."


def _listed(measures: list[str]) -> str:
    names = [measure_name(measure) for measure in measures]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _signatures(story: RunStory) -> Html:
    """The signature of each score, with its corpora unless all have the same."""
    newest = story.curves.newest.get("validation", {})
    found = [(corpus.rstrip("/") or "validation", corpus, newest) for corpus in validation_corpora(story)]
    found += [(f"evaluated: {name}", "", scores) for name, scores in story.evaluations.items()]
    lines = []
    for key in ("bleu", "chrf"):
        of_corpora: dict[str, list[str]] = {}
        for name, prefix, record in found:
            if signature := record.get(f"{prefix}{key}_signature"):
                of_corpora.setdefault(str(signature), []).append(name)
        for signature, names in of_corpora.items():
            where = f" ({', '.join(names)})" if len(of_corpora) > 1 else ""
            lines.append(tag("li", f"{NAMES[key]}{where}: ", tag("code", signature)))
    return together([tag("h3", "Signatures"), tag("ul", *lines)]) if lines else Html()
