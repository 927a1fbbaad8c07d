"""Checks between the settings of the data, and of the existence of the files that they name."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from dist_transformer.config import data_schema
from dist_transformer.config.data_schema import CorpusConfig, DataConfig, FilterConfig, MixtureConfig
from dist_transformer.config.paths import is_address, is_pattern, local_files, located

SPLIT_NAMES = ("validation", "test")
"""Names that a prepared corpus uses beside those of the training corpora."""
RESERVED_NAMES = ("train", *SPLIT_NAMES)
"""Names of the corpora of `data` itself."""

_CORPUS_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9_.-]+")


def check_corpora(data: DataConfig) -> Iterator[str]:
    """Checks that exactly one of `train` and `mixture` is given, each corpus by itself, and the names of further validation
    corpora, which are prefixes of measures and values of --split."""
    if data.train is None and data.mixture is None:
        yield "data: no training corpus; give data.train, or data.mixture for several"
    if data.train is not None and data.mixture is not None:
        yield "data.mixture: stands beside data.train; move that into data.mixture.corpora, or remove one"

    for path, corpus in _corpora(data):
        yield from _kind_problems(path, corpus)
        for number, tag in enumerate(corpus.tags):
            if not tag or any(character.isspace() for character in tag):
                yield f"{path}.tags.{number}: {tag!r}: a tag is one word, such as <2de>, without spaces; write several apart"
    yield from _name_problems("data.more_validation", data.more_validation, RESERVED_NAMES)


def check_filters(data: DataConfig) -> Iterator[str]:
    """Checks the rules of `filters`, and the filters that a corpus has of its own."""
    yield from _rule_problems("data.filters", data.filters.rules, data.languages_of(CorpusConfig()))
    training = [*data.training_corpora().values()]
    for path, corpus in _corpora(data):
        here = f"{path}.filters"
        if corpus.filters and not any(corpus is each for each in training):
            yield f"{here}: is for training corpora, whose pairs alone are cleaned; remove it"
        elif any(corpus is each for each in training):
            yield from _own_filter_problems(here, corpus, data)


def check_mixture(data: DataConfig) -> Iterator[str]:
    """Checks the names, weights and stages of the mixture."""
    mixture = data.mixture
    if mixture is None:
        return
    yield from _name_problems("data.mixture.corpora", mixture.corpora, SPLIT_NAMES)
    if mixture.weights is not None:
        yield from _weight_problems("data.mixture.weights", mixture.weights, mixture)
        if mixture.temperature != 1.0:
            yield (
                f"data.mixture.temperature: {mixture.temperature} stands beside data.mixture.weights, which say the "
                "shares already; remove one"
            )
    weights, reached = mixture.weights, dict[str, float]()
    for number, stage in enumerate(mixture.schedule):
        here = f"data.mixture.schedule.{number}"
        begins = {f"after_epochs.{name}": epochs for name, epochs in (stage.after_epochs or {}).items()}
        begins |= {} if stage.from_step is None else {"from_step": stage.from_step}
        if len(begins) != 1:
            yield f"{here}: expected either from_step: STEP or after_epochs: {{CORPUS: NUMBER}}, of one corpus"
        for key, value in begins.items():
            if value <= (before := reached.get(key, 0)):
                yield f"{here}.{key}: {value} does not come after the {before} before it; stages stand in their order"
        for name in stage.after_epochs or {}:
            if name not in mixture.corpora:
                yield f"{here}.after_epochs.{name}: {_no_such_corpus(mixture)}"
            elif weights is not None and not weights.get(name, 1):
                yield f"{here}.after_epochs.{name}: has weight 0 until then, so it would never come; give it more before"
        weights, reached = stage.weights, reached | begins
        yield from _weight_problems(f"{here}.weights", stage.weights, mixture)


def check_sampling(data: DataConfig, tokenizer: Any) -> Iterator[str]:
    """Checks that sampling and modifiers are on the fly: a corpus that is tokenized once cannot be changed anew."""
    needs = "needs data.on_the_fly: true (`prepare` tokenizes only once); set it, or"
    if tokenizer.sampling > 0 and not data.on_the_fly:
        yield f"tokenizer.sampling: {tokenizer.sampling} {needs} sampling to 0"
    for name, share in data.modifiers.items():
        if name not in data_schema.MODIFIERS:
            yield f"data.modifiers.{name}: no such modifier; there are {', '.join(data_schema.MODIFIERS)}"
        elif not 0 <= share <= 1:
            yield f"data.modifiers.{name}: expected a share of the rows, 0 to 1; got {share}"
        elif share and not data.on_the_fly:
            yield f"data.modifiers.{name}: {share} {needs} remove it"


def corpus_file_problems(data: DataConfig, is_made: Callable[[str], bool]) -> Iterator[str]:
    """Yields a problem for each missing local file or pattern that nothing makes; addresses are checked when read."""
    training = [*data.training_corpora().values()]
    for path, corpus in _corpora(data):
        named, found = {key: getattr(corpus, key) for key in ("source", "target", "path")}, {}
        with suppress(ValidationError):  # which check_filters has named
            if any(corpus is each for each in training):
                filters = data.filters_of(corpus)
                named |= {f"filters.scores.{name}": name for name in filters.scores if corpus.source}
        for key, name in named.items():
            if not name or is_address(where := located(data.root, name)):
                continue
            found[key] = len(local_files(data.root, name))
            if not found[key] and not is_made(where):
                problem = "no file fits" if is_pattern(name) else "no such file:"
                yield f"{path}.{key}: {problem} {where} (data.root is {data.root!r})"
        if found.get("source") and found.get("target") and found["source"] != found["target"]:
            yield (
                f"{path}.target: {found['target']} files fit, but {found['source']} fit "
                f"{path}.source; file n of one side, in the order of their names, is aligned with "
                "file n of the other"
            )


def corpus_files(data: DataConfig, after_scores: str = "") -> Iterator[str]:
    """Yields the local files of the corpora, those of quality scores with `after_scores` behind their names."""
    for _, corpus in _corpora(data):
        for name in filter(None, (corpus.source, corpus.target, corpus.path)):
            yield from local_files(data.root, name)
    for corpus in (each for each in data.training_corpora().values() if each.source):
        for name in data.filters_of(corpus).scores:
            yield from (f"{file}{after_scores}" for file in local_files(data.root, name))


def _corpora(data: DataConfig) -> Iterator[tuple[str, CorpusConfig]]:
    above = "data" if data.mixture is None else "data.mixture.corpora"
    yield from ((f"{above}.{name}", corpus) for name, corpus in data.training_corpora().items())
    yield from ((f"data.{name}", corpus) for name, corpus in data.held_out_corpora().items())


def _kind_problems(path: str, corpus: CorpusConfig) -> Iterator[str]:
    kinds = [kind for kind in ("path", "hub", "demo", "plugin") if getattr(corpus, kind)]
    kinds += ["source+target"] if corpus.source or corpus.target else []
    if len(kinds) != 1:
        got = " and ".join(kinds) or "nothing"
        yield f"{path}: expected one of source+target, path, hub, demo, plugin; got {got}"
        return
    if kinds == ["source+target"] and not (corpus.source and corpus.target):
        missing = "target" if corpus.source else "source"
        yield f"{path}: aligned text needs both files; {missing} is not given"
    if corpus.columns and kinds[0] not in ("path", "hub"):
        names = {"source+target": "aligned text", "demo": "the demonstration corpus", "plugin": "a plug-in"}
        yield f"{path}.columns: {names[kinds[0]]} has no columns; remove it, or give the table as `path`"
    for key in ("subset", "revision"):
        if getattr(corpus, key) and kinds != ["hub"]:
            yield f"{path}.{key}: is for a dataset of the Hub (`hub`); remove it"


def _rule_problems(path: str, rules: Mapping[str, Any], languages: tuple[str, str]) -> Iterator[str]:
    for name, value in rules.items():
        here, is_share = f"{path}.rules.{name}", name in data_schema.SHARES
        least = 0 if is_share else 1 + (name == "repeated")
        wanted = "a share from 0 to 1" if is_share else f"a whole number from {least}"
        is_number = isinstance(value, int | float) and value >= least and (is_share or float(value).is_integer())
        if name not in data_schema.RULE_THRESHOLDS:
            yield f"{here}: no such rule; there are {', '.join(data_schema.RULE_THRESHOLDS)}"
        elif not isinstance(value, bool) and not (is_number and (value <= 1 or not is_share)):
            yield f"{here}: expected {wanted}, true ({data_schema.RULE_THRESHOLDS[name]:g}) or false; got {value!r}"
        elif name in ("language", "lingua") and value and len({*map(language_code, languages)}) == 1:
            yield f"{here}: compares {languages[0]} with {languages[1]}, which are one language; set it to false"


def language_code(language: str) -> str:
    """Returns the code of two or three letters of a language: pt for pt_BR."""
    return re.split("[-_]", language.lower())[0]


def _own_filter_problems(path: str, corpus: CorpusConfig, data: DataConfig) -> Iterator[str]:
    """Checks the filters of one corpus. Limits of length may only be lower: memory is planned by those of all."""
    try:
        filters = data.filters_of(corpus)
    except ValidationError as error:
        known = f"; it has the keys {', '.join(FilterConfig.model_fields)}"
        for each in error.errors():
            keys = known if each["type"] == "extra_forbidden" else ""
            yield f"{path}.{'.'.join(map(str, each['loc']))}: {each['msg']}; got {each['input']!r}{keys}"
        return
    languages = data.languages_of(corpus)
    yield from _rule_problems(path, filters.rules if corpus.languages else corpus.filters.get("rules", {}), languages)
    for key in ("max_tokens", "max_length_ratio"):
        if (own := getattr(filters, key)) > (limit := getattr(data.filters, key)):
            yield f"{path}.{key}: {own:g} is above data.filters.{key} {limit:g}, which holds for all; lower this, or raise that"
    if "plugin" in corpus.filters:
        yield f"{path}.plugin: is one for all corpora; give it as data.filters.plugin, or remove it"
    if filters.scores and (corpus.demo or corpus.plugin):
        yield f"{path}.scores: are columns of a table, or files beside text files; this corpus is neither: remove them here"


def _name_problems(path: str, names: Iterable[str], taken: Collection[str]) -> Iterator[str]:
    for name in names:
        if name in taken:
            yield f"{path}.{name}: {name!r} is the name of data.{name}; give this corpus another"
        elif not _CORPUS_NAME.fullmatch(name):
            yield (
                f"{path}.{name}: {name!r}: expected letters, digits, '.', '_' and '-', not dots alone: it names figures and "
                "files; rename the corpus"
            )


def _no_such_corpus(mixture: MixtureConfig) -> str:
    return f"no such corpus in data.mixture.corpora; there are {', '.join(mixture.corpora)}"


def _weight_problems(path: str, weights: dict[str, float], mixture: MixtureConfig) -> Iterator[str]:
    for name, weight in weights.items():
        if name not in mixture.corpora:
            yield f"{path}.{name}: {_no_such_corpus(mixture)}"
        elif weight < 0:
            yield f"{path}.{name}: expected 0 or more, got {weight}"
    missing = [name for name in mixture.corpora if name not in weights]
    if missing:
        yield f"{path}: no weight for {', '.join(missing)}; give one for each corpus, 0 to leave it out"
    elif all(weight == 0 for weight in weights.values()):
        yield f"{path}: all weights are 0, so there is nothing to train on; give one corpus more than 0"
