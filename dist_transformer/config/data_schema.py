"""The settings of the data: corpora, mixtures, filters, batches, tokenizer. Defaults live here and nowhere else."""

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from dist_transformer.config.section import Bool, Fraction, Int, IntOrAuto, Number, PathStr, PositiveInt, Section, Str
from dist_transformer.errors import UserError

MODIFIERS = ("no_final_punctuation", "upper_case", "title_case", "tags", "typos", "noise")
"""Names of data.modifiers in the order in which they are applied, which is also that of a row's random numbers."""
SHARES = {"markup": 0.3, "letters": 0.5, "digits": 0.4, "punctuation": 0.4, "near_duplicates": 0.8}
COUNTS = {"repeated": 5, "numbers": 3, "language": 30, "lingua": 30, "held_out": 1, "duplicates": 1}
RULE_THRESHOLDS: dict[str, float] = {**SHARES, **COUNTS}
"""The rules of data.filters.rules with the thresholds that `true` stands for: shares of a sentence, and whole numbers."""


class CorpusConfig(Section):
    """One set of aligned text: exactly one of `source`+`target` files, `path`, `hub`, `demo` or `plugin`.

    A file is a path relative to data.root, an absolute one, or an address that fsspec knows (s3://, gs://, hf://,
    http://, memory://); with `*`, `?` or `[` in it, a pattern: matching files are read in the order of their names.
    """

    source: Str | None = Field(
        None,
        description="Text of the source side, one sentence a line (.gz, .zst, .xz too); patterns and addresses too.",
    )
    target: Str | None = Field(None, description="Text of the target side, aligned line by line with `source`.")
    path: Str | None = Field(
        None,
        description="Both sides: .tsv .csv .jsonl (.gz, .zst, .xz too) .parquet .arrow; patterns and addresses too.",
    )
    hub: Str | None = Field(None, description="Dataset id on the Hugging Face Hub, e.g. wmt/wmt14.")
    subset: Str | None = Field(None, description="Configuration name of the Hub dataset, e.g. de-en.")
    split: Str = Field("train", description="Split of the Hub dataset.")
    revision: Str | None = Field(None, description="Revision (commit) of the Hub dataset.")
    columns: tuple[Str, Str] | None = Field(
        None,
        description="Names of the source and target columns; dots reach into nested ones: translation.en. "
        "Default: the two languages, or `translation.<language>` where there are no such columns. Of a tsv: numbers from 0, "
        "default 0 and 1, or names in its first line.",
    )
    languages: tuple[Str, Str] | None = Field(
        None, description="Codes of its source and target language, where they are not those of `data`: [de, en]."
    )
    demo: Literal["train", "validation", "test"] | None = Field(
        None, description="A split of the embedded English-German demonstration corpus; needs no files."
    )
    plugin: Str | None = Field(
        None, description="A function of your own that yields the pairs: FILE.py:NAME, MODULE:NAME or an entry point."
    )
    tags: tuple[Str, ...] = Field(
        (),
        description="Put before each source sentence: <2de>, <news>. A tokenizer trained here keeps each as one piece; "
        "`translate` takes them as part of the text.",
    )
    filters: dict[Str, Any] = Field(
        default_factory=dict,
        description="Keys of data.filters with other values for this training corpus; `rules` and `scores` name by name.",
    )

    @model_serializer(mode="wrap")
    def _without_default_languages(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves `languages` out where it is not given: digests of corpora are then those of releases without it."""
        return {key: value for key, value in dump(self).items() if key != "languages" or value is not None}


class MixtureStage(Section):
    """Weights of a mixture that hold from a given global batch on, or after so many epochs of a corpus: one of the two."""

    from_step: Int | None = Field(None, gt=1, description="First step (skipped updates counted) with these weights.")
    after_epochs: dict[Str, Number] | None = Field(
        None, description="{corpus: number}: they begin where it was read so often, which is then the end of an epoch."
    )
    weights: dict[Str, Number] = Field(description="Weight of each corpus, as in mixture.weights.")


class MixtureConfig(Section):
    """Several training corpora. Each is read from its first row to its last, again and again, at its own pace.

    An epoch has as many pairs as all corpora together; with neither weights nor a temperature it is each pair once.
    """

    corpora: dict[Str, CorpusConfig] = Field(min_length=1, description="The corpora by name.")
    weights: dict[Str, Number] | None = Field(
        None, description="Share of each corpus in every window, in any unit; none: its number of pairs."
    )
    temperature: Number = Field(
        1.0, gt=0.0, description="Shares by (pairs of the corpus / all pairs) ** (1 / temperature); 1: by their pairs."
    )
    schedule: tuple[MixtureStage, ...] = Field((), description="Other weights later, in order.")


class FilterConfig(Section):
    """Rules by which pairs are dropped; dropped pairs are counted by the name of the rule."""

    max_tokens: Int = Field(256, ge=2, le=100_000, description="Longest side in tokens, end of sentence included.")
    max_length_ratio: Number = Field(
        9.0, gt=1.0, description="Largest ratio of the longer to the shorter side, in tokens; pairs under 10 pass."
    )
    drop_identical: Bool = Field(False, description="Drop pairs whose source equals their target.")
    bad_encoding: Literal["raise", "drop"] = Field(
        "raise", description="Invalid UTF-8 in a text file: stop and name the line, or drop the pair and count it."
    )
    plugin: Str | None = Field(
        None, description="A rule of your own, keep(source, target): FILE.py:NAME, MODULE:NAME or an entry point."
    )
    rules: dict[Str, Any] = Field(
        default_factory=dict,
        description="Rules for training corpora, each with a threshold, true (the default one) or false: markup, letters, "
        "digits, punctuation, repeated, numbers, language, lingua, held_out (on unless false), duplicates, near_duplicates.",
    )
    scores: dict[Str, Number] = Field(
        default_factory=dict,
        description="Least quality scores, by column of a table, or by file with a number a line beside text files.",
    )

    def thresholds(self) -> dict[str, float]:
        """Returns the rules that are on, with their thresholds."""
        given = {"held_out": True, **self.rules}
        return {name: RULE_THRESHOLDS[name] if on is True else on for name, on in given.items() if on is not False}

    def without_rules(self) -> "FilterConfig":
        """Returns the filters of a corpus that is not trained on: without `rules` and `scores`."""
        return self.model_copy(update={"rules": {"held_out": False}, "scores": {}})


class DataConfig(Section):
    """Corpora, and their way from text to micro-batches."""

    root: PathStr = Field(".", description="Folder or address that relative corpus paths start from.")
    source_language: Str = Field("en", description="Code of the source language, for columns, rules and records.")
    target_language: Str = Field("de", description="Code of the target language; also says how BLEU cuts zh, ja, ko.")
    train: CorpusConfig | None = Field(None, description="The training corpus; or give `mixture`.")
    mixture: MixtureConfig | None = Field(None, description="Several training corpora instead of `train`.")
    validation: CorpusConfig | None = Field(
        None, description="The validation corpus; its loss and its scores are measured in training."
    )
    more_validation: dict[str, CorpusConfig] = Field(
        default_factory=dict,
        description="Further validation corpora by name; their measures are `NAME/loss`, `NAME/bleu`, ...",
    )
    test: CorpusConfig | None = Field(None, description="The test corpus that `evaluate` scores.")
    prepared: PathStr | None = Field(
        None, description="Folder of the prepared corpus; default: <run.root>/prepared/<digest of what made it>."
    )
    normalization: Literal["none", "NFC", "NFKC"] = Field(
        "none", description="Unicode form that text is brought into when it is read (the tokenizer's own comes after)."
    )
    on_the_fly: Bool = Field(
        False,
        description="Tokenize in the loader processes, in every epoch anew; parquet is then read where it lies. "
        "Needed by tokenizer.sampling and modifiers. false: once, by `prepare`.",
    )
    filters: FilterConfig = Field(default_factory=FilterConfig, description="Which pairs are dropped.")
    modifiers: dict[Str, Number] = Field(
        default_factory=dict,
        description="Share of the rows that are changed in training, by the change: upper_case, title_case, tags, "
        "no_final_punctuation (both sides); typos, noise (the source). Needs on_the_fly.",
    )
    lanes: PositiveInt = Field(
        8,
        description="Micro-batches per optimizer step over all ranks (fairseq: update-freq x GPUs). Part of the recipe.",
    )
    max_tokens: IntOrAuto = Field(
        8192,
        description="Largest micro-batch in tokens: source + target, padding counted. auto: the largest that fits into "
        "memory, found at a start and kept from the first checkpoint on.",
    )
    reslice_from: PositiveInt | None = Field(
        None,
        description="The data.lanes of the checkpoint to go on from, where it is another one: the rest of the epoch is "
        "cut into the new lanes, each row still once.",
    )
    window_rows: PositiveInt = Field(20_000, description="Rows of a lane shuffled, sorted and resumed together.")
    row_group_rows: PositiveInt = Field(4096, description="Rows per parquet row group of the prepared corpus.")
    loader_workers: Int = Field(1, ge=0, description="Loader processes per rank; 0 reads in the training process.")
    on_bad_row_group: Literal["raise", "quarantine"] = Field(
        "raise", description="A row group that cannot be read: end the run, or leave it out, counted and named."
    )
    max_quarantined_row_groups: PositiveInt = Field(10, description="The run ends when more are quarantined.")
    audit: Bool = Field(False, description="Also write the row ids of every step to audit.jsonl.")

    def token_budget(self) -> int:
        """Returns `max_tokens` as a number. Raises UserError: it is `auto`, which only training resolves."""
        if self.max_tokens == "auto":
            raise UserError(
                "data.max_tokens is auto: it is found when training first starts. Give a number here: data.max_tokens=8192"
            )
        return self.max_tokens

    def filters_of(self, corpus: CorpusConfig) -> FilterConfig:
        """Returns the filters of a corpus: `filters`, and over them its own. ValidationError if those are none."""
        if not corpus.filters:
            return self.filters
        given, merged = corpus.filters, self.filters.model_dump()
        for key in ("rules", "scores"):
            if isinstance(own := given.get(key, {}), dict):
                given = {**given, key: {**merged[key], **own}}
        return FilterConfig.model_validate({**merged, **given})

    def languages_of(self, corpus: CorpusConfig) -> tuple[str, str]:
        """Returns the codes of the source and the target language of a corpus."""
        return corpus.languages or (self.source_language, self.target_language)

    def held_out_corpora(self) -> dict[str, CorpusConfig]:
        """Returns the corpora whose sentences `held_out` removes from the training corpora, by their keys."""
        found = {"validation": self.validation, "test": self.test}
        further = {f"more_validation.{name}": corpus for name, corpus in self.more_validation.items()}
        return {**{name: corpus for name, corpus in found.items() if corpus is not None}, **further}

    def holds_out(self) -> bool:
        """True if the rule held_out is on for a training corpus."""
        return any("held_out" in self.filters_of(corpus).thresholds() for corpus in self.training_corpora().values())

    def training_corpora(self) -> dict[str, CorpusConfig]:
        """Returns the training corpora by name, in order; a single one is named `train`."""
        if self.mixture is not None:
            return self.mixture.corpora
        return {"train": self.train} if self.train is not None else {}


class TokenizerConfig(Section):
    """The sentencepiece model: trained by `prepare`, or taken from files."""

    type: Literal["bpe", "unigram"] = Field("bpe", description="Kind of sentencepiece model.")
    vocabulary_size: PositiveInt = Field(37_000, description="Pieces per model; rounded up to a multiple of 8 (5.1).")
    shared: Bool = Field(True, description="One vocabulary for both languages (5.1).")
    character_coverage: Number = Field(
        1.0, gt=0.0, le=1.0, description="Share of characters that get a piece; sentencepiece takes 0.98 to 1."
    )
    normalization: Literal["nmt_nfkc", "identity"] = Field(
        "nmt_nfkc",
        description="What sentencepiece does to both sides: nmt_nfkc replaces full-width punctuation, `…` and the like, which "
        "no translation then has; identity: nothing, for targets in Chinese, Japanese, Thai or Persian.",
    )
    source_model: PathStr | None = Field(None, description="An existing .model file to take instead of training one.")
    target_model: PathStr | None = Field(
        None,
        description="The target side's .model file; where shared, one with the same pieces by the same ids (Marian's).",
    )
    sampling: Fraction = Field(
        0.0,
        description="Share of merges left out (BPE dropout), or alpha of unigram sampling (smaller: more varied), in training; "
        "0: none. Needs data.on_the_fly.",
    )
