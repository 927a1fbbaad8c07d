"""The recipe of a prepared corpus: everything that determines its content, as plain JSON.

Two preparations with the same recipe give the same rows in the same order, so its digest names the folder, and a
folder made by another recipe is refused with the settings that differ.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_transformer.config.data_schema import CorpusConfig, DataConfig, FilterConfig, TokenizerConfig
from dist_transformer.config.loading import flatten
from dist_transformer.config.schema import Config
from dist_transformer.data.modifiers import inline_tags
from dist_transformer.data.sources.files import corpus_fingerprint, is_text_at_hand
from dist_transformer.data.tokenizer.tokenizer import TRAINING_SENTENCES
from dist_transformer.errors import DataError, MachineError
from dist_transformer.files import file_sha256
from dist_transformer.plugins import find

PREPARED_FORMAT, FORMER_RULES, FORMAT_BEFORE_RULES = FORMATS = 4, 3, 2
"""Version of the format, incremented whenever the same settings give other rows, another order or other files.

Format 3 (`Cleaner.is_former`) had other keys, tags and numbers, 2 no rules and scores; both are trained on as they are.
"""

MOST_NAMES = 10
"""Names of files that a message gives; it has the number of all."""


def make_recipe(config: Config) -> dict[str, Any]:
    """Returns the recipe of a configuration; DataError if a corpus or tokenizer file is missing."""
    data, validation = config.data, config.data.validation
    held_out = data.held_out_corpora() if data.holds_out() else {}
    return {
        **recipe_without_corpora(config),
        "training": {name: _training_recipe(corpus, data) for name, corpus in data.training_corpora().items()},
        "validation": corpus_fingerprint(validation, data) if validation else None,
        "held_out": {name: corpus_fingerprint(each, data) for name, each in held_out.items() if name != "validation"},
    }


def not_held_out(data: DataConfig, recipe: dict[str, Any]) -> list[str]:
    """Returns the keys of corpora that the rule held_out is about now, but was not when `recipe` was prepared.

    None if that was before there was the rule, or a text cannot be had; nor those whose text is gone.
    """
    if "held_out" not in recipe or not data.holds_out():
        return []
    known = [each and recipe_without_beginnings(each) for each in (recipe["validation"], *recipe["held_out"].values())]
    here = {name: corpus for name, corpus in data.held_out_corpora().items() if is_text_at_hand(corpus, data)}
    with suppress(DataError, MachineError):  # a server does not give the text
        prints = {name: recipe_without_beginnings(corpus_fingerprint(corpus, data)) for name, corpus in here.items()}
        return [name for name, found in prints.items() if found not in known]
    return []


def former_rules_warning(folder: Path, recipe: dict[str, Any]) -> str:
    """Returns a warning if a corpus has the rows that the rules of a former format keep, or ""."""
    if (version := recipe.get("format")) == PREPARED_FORMAT:
        return ""
    about = "held-out text, numbers, markup: see docs/data.md; for those of this version set another data.prepared"
    return f"{folder} was prepared by the rules of format {version} ({about})"


def recipe_of_format(version: int | None, recipe: dict[str, Any], config: Config) -> dict[str, Any]:
    """Returns a recipe as one of FORMATS has it; unchanged if the user asks for what that could not do."""
    data = config.data
    if version in (FORMER_RULES, FORMAT_BEFORE_RULES):
        recipe = recipe_without_beginnings(recipe)
    if version != FORMAT_BEFORE_RULES:
        return {**recipe, "format": version if version in FORMATS else PREPARED_FORMAT}
    own = any(corpus.filters for corpus in data.training_corpora().values())
    if own or data.filters.scores or any(data.filters.rules.values()):
        return recipe
    filters = {key: value for key, value in recipe["filters"].items() if key not in ("rules", "scores")}
    rest = {key: value for key, value in recipe.items() if key != "held_out"}
    return {**rest, "format": FORMAT_BEFORE_RULES, "filters": filters}


def recipe_without_beginnings(recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe that knows files whose server tells no version by name and size alone, as former formats did."""

    def left(each: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in each.items() if key != "beginning_sha256"}

    return dict(json.loads(json.dumps(recipe), object_hook=left))


def recipe_without_corpora(config: Config) -> dict[str, Any]:
    """Returns the part of the recipe that does not need access to the text."""
    inline = inline_tags(config.data)
    return {
        **({"inline_tags": inline} if inline else {}),
        "format": PREPARED_FORMAT,
        "seed": config.run.seed,
        "source_language": config.data.source_language,
        "target_language": config.data.target_language,
        "training_order": list(config.data.training_corpora()),
        "normalization": config.data.normalization,
        "on_the_fly": config.data.on_the_fly,
        "filters": _filter_recipe(config.data.filters),
        "row_group_rows": config.data.row_group_rows,
        "tokenizer": _tokenizer_recipe(config),
    }


def refuse_other_recipe(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises a DataError that names the differences if `folder` has another recipe; only keys of `wanted` count."""
    if isinstance(version := found.get("format"), int) and version > PREPARED_FORMAT:
        raise DataError(f"{folder}: of a newer version (format {version}, this reads {PREPARED_FORMAT}): use that one")
    if lines := differences(found, wanted):
        raise DataError(
            f"{folder}: this folder was prepared with other settings or another text:\n{lines}\n"
            "Put it back; or set another data.prepared, or delete this one if no run needs it. To train a run further on it: "
            "another run.name, training.init_from=RUN, tokenizer.source_model=RUN/model/source.model (docs/finetuning.md)."
        )


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Returns a line for each difference between two recipes; only keys of `wanted` count."""
    names = {"training": "data" if wanted.get("training_order") == ["train"] else "data.mixture.corpora"}
    both = [{names.get(key, key): side[key] for key in wanted if key in side} for side in (wanted, found)]
    ours, theirs = map(flatten, both)
    differing = (key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key))
    return "\n".join(f"  {_difference(key, theirs.get(key), ours.get(key))}" for key in differing)


def _difference(key: str, found: Any, wanted: Any) -> str:
    """Describes a difference; of files their names."""
    sides = found, wanted
    if not any(isinstance(side, list) and side and isinstance(side[0], dict) for side in sides):
        return f"{key}: {found!r} in the folder, {wanted!r} now"
    files = [{tuple(file.items()) for each in side or () for file in each.get("files", [each])} for side in sides]
    gone, new = ({dict(file)["name"] for file in first - second} for first, second in (files, files[::-1]))
    changes = {"removed": gone - new, "added": new - gone, "changed": gone & new}
    said = [f"{len(each)} {what} ({', '.join(sorted(each)[:MOST_NAMES])})" for what, each in changes.items() if each]
    return f"{key}: {'; '.join(said) or 'the same files in another order'}"


def taken_models(settings: TokenizerConfig) -> list[Path]:
    """Returns the existing models to use: one if shared, else source and target; none if they are trained."""
    return [Path(model) for model in (settings.source_model, settings.target_model) if model is not None]


def _filter_recipe(filters: FilterConfig) -> dict[str, Any]:
    """A plug-in counts by its name and content, wherever its file lies."""
    own = {} if filters.plugin is None else {"plugin": find("data.filters.plugin", filters.plugin).identity}
    return {**filters.model_dump(exclude={"plugin"}), **own, "rules": filters.thresholds()}


def _training_recipe(corpus: CorpusConfig, data: DataConfig) -> dict[str, Any]:
    filters = data.filters_of(corpus)
    own: dict[str, Any] = {"filters": _filter_recipe(filters)} if corpus.filters else {}
    if corpus.source and filters.scores:
        own["scores"] = [corpus_fingerprint(CorpusConfig(path=name), data) for name in filters.scores]
    return {**corpus_fingerprint(corpus, data), **own}


def _tokenizer_recipe(config: Config) -> dict[str, Any]:
    if models := taken_models(config.tokenizer):
        return {"models_sha256": [_model_sha256(path) for path in models]}
    former = {"normalization"} if config.tokenizer.normalization == "nmt_nfkc" else set[str]()  # before, no choice
    trained = config.tokenizer.model_dump(exclude={"source_model", "target_model", "sampling"} | former)
    shares = {name: share for name, share in sorted(config.data.modifiers.items()) if share}
    return {**trained, "training_sentences": TRAINING_SENTENCES, **({"modifiers": shares} if shares else {})}


def _model_sha256(path: Path) -> str:
    if not path.is_file():
        copy = "a corpus that was prepared with it has a copy in its folder tokenizer/: give that"
        raise DataError(f"{path}: no such file, expected a sentencepiece model (.model); {copy}.")
    return file_sha256(path)
