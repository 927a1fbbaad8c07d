"""init: a commented configuration for one's own text, with validation and test pairs held out of it."""

import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dist_transformer.cluster.profiles import load_profile
from dist_transformer.config.checks import run_name_problems
from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.loading import load_config
from dist_transformer.config.paths import local_files
from dist_transformer.config.schema import PRESETS
from dist_transformer.config.yaml12 import dump
from dist_transformer.decoding.long_lines import WITHOUT_SPACES
from dist_transformer.errors import UserError
from dist_transformer.format import progress_bar
from dist_transformer.run.outputs import check_output, is_stream, write_output, writing

if TYPE_CHECKING:  # at run time it would import numpy for every command
    from dist_transformer.data.sources.survey import Pair, Survey

MOST_HELD_OUT, HELD_OUT_PART = 2000, 30
LANGUAGE = re.compile(r"\.([a-z]{2,3}(?:[-_]\w+)?)(?:\.gz|\.zst|\.xz)?$")
CODE = re.compile(r"[\w-]+")
SIDES, SPLITS = ("source", "target"), ("validation", "test")
TwoFiles = Annotated[tuple[Path, Path] | None, typer.Option(help="Source and target file; default: held out.")]


def init_command(
    source: Annotated[Path, typer.Argument(help="Source text, a sentence a line; or one table.")],
    target: Annotated[Path | None, typer.Argument(help="Target text, aligned by line.")] = None,
    out: Annotated[Path | None, typer.Option(help="The YAML file to write; default: NAME.yaml.")] = None,
    source_language: Annotated[str | None, typer.Option(help="Its code: en.")] = None,
    target_language: Annotated[str | None, typer.Option(help="Its code: de.")] = None,
    columns: Annotated[tuple[str, str] | None, typer.Option(help="Of a table; default: the languages, or 0 1.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    validation: TwoFiles = None,
    test: TwoFiles = None,
    held_out: Annotated[int | None, typer.Option(min=1, help="Pairs to hold out for each of these two.")] = None,
    preset: Annotated[
        Literal["tiny", "small", "base", "big"] | None, typer.Option(help="Size of the model; default: by the pairs.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Length of the run; default: by the text.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Profile: a name in slurm/clusters/ or a path.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
) -> None:
    """Look at your text and write a commented configuration for it, with validation and test pairs held out.

    Without a terminal, or with --yes, what no option gives is chosen and said.
    """
    questions = _Questions(is_asked=not yes)
    profile = load_profile(cluster) if cluster else {"ranks_per_node": 1, "gpus_per_node": 1}
    corpus, guesses = _corpus(source, target, columns)
    languages = _ask_languages(questions, (source_language, target_language), guesses)
    name = questions.ask("name of the run", name, out.stem if out else "-".join(languages))
    if problems := [*run_name_problems(str(name))]:
        raise UserError(f"{problems[0]} with --name")
    out = out or Path(f"{name}.yaml")
    folder = out.parent.absolute() / f"{out.stem}-text"
    check_output(out, "a configuration", is_file=True)
    if is_stream(out):
        raise UserError(f"--out {out}: is a device or a pipe, expected a file, which `train` reads")
    check_output(folder, "text files")

    from dist_transformer.planning import proposal
    from dist_transformer.reporting.html import render

    corpus = _with_columns(corpus, languages)
    data = DataConfig(source_language=languages[0], target_language=languages[1], train=corpus)
    corpora = {split: _files(*two) for split, two in zip(SPLITS, (validation, test), strict=True) if two}
    _check_readable(corpora, data)
    found = _surveyed(corpus, data)
    splits = [split for split in SPLITS if split not in corpora]
    each = _ask_held_out(questions, held_out, found) if splits else 0
    pairs = found.pairs - each * len(splits)
    preset = questions.ask("size of the model", preset, proposal.preset_for(pairs), [*PRESETS])
    tokens, longest = pairs * sum(side.mean for side in found.sides), max(side.percentile_99 for side in found.sides)
    sections = proposal.proposed(preset, tokens, longest, found.characters, max_steps)
    more = proposal.token_ratio(sections["tokenizer"]["vocabulary_size"])
    if found.sides[1].script.upper() in WITHOUT_SPACES:
        sections["tokenizer"]["normalization"] = "identity"
    if splits:
        corpora |= {split: CorpusConfig(**{side: f"{split}.{code}" for side, code in zip(SIDES, languages, strict=True)})
                    for split in ("train", *splits)}  # fmt: skip
    files = {split: each.model_dump(exclude_defaults=True) for split, each in {"train": corpus, **corpora}.items()}
    has_slurm = bool(cluster or shutil.which("sbatch"))
    shown = shlex.quote(str(out))
    text = render(
        "config.yaml", **sections, name=name, out=shown, languages=languages, found=found, pairs=pairs,
        num_held_out=each * len(splits), text=dump({"root": str(folder), **files} if splits else files),
        recipe=proposal.RECIPES[preset], per_epoch=proposal.steps_per_epoch(preset, more * tokens),
        num_ranks=min(sections["data"]["lanes"], profile.get("ranks_per_node", 1)), cluster=cluster,
        has_slurm=has_slurm, profile=profile, more=more,
    )  # fmt: skip
    parts = {split: found.sample[at * each :][:each] for at, split in enumerate(splits)}
    with _new_text(data, parts, folder, found.pairs) if splits else nullcontext():
        write_output(out, text)
    load_config(out)
    if questions.chosen:
        print(f"not asked, chosen: {', '.join(questions.chosen)}")
    print(f"{out}: written, with the reason of each setting. Next:\n  dist-transformer train {shown}")
    print(f"  dist-transformer submit {shown}\n" if has_slurm else "", end="")
    print(f"  dist-transformer translate runs/{name} < FILE")


class _Questions:
    """Questions about what no option gives: asked at a terminal, else answered as proposed, which `chosen` then says."""

    def __init__(self, is_asked: bool) -> None:
        self._is_asked = is_asked and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        self.chosen: list[str] = []

    def ask(self, question: str, given: Any, proposed: Any, choices: list[str] | None = None) -> Any:
        """Returns what is given, else the answer."""
        if given is not None:
            return given
        if self._is_asked:
            from rich.prompt import IntPrompt, Prompt

            kind = IntPrompt if isinstance(proposed, int) else Prompt
            return kind.ask(question, default=proposed, choices=choices)
        self.chosen.append(f"{question} {proposed}")
        return proposed


def _ask_languages(questions: _Questions, given: Sequence[str | None], guesses: Sequence[str]) -> tuple[str, str]:
    source = questions.ask("source language", given[0], guesses[0])
    target = questions.ask("target language", given[1], guesses[1])
    if not all(map(CODE.fullmatch, (source, target))) or source == target:
        raise UserError(f"{source} and {target}: expected two codes, as --source-language en --target-language de")
    return source, target


def _check_readable(corpora: Mapping[str, CorpusConfig], data: DataConfig) -> None:
    """Raises for a held-out text that is given and cannot be used, before anything is written."""
    from dist_transformer.data.sources.corpus import read_pairs

    for split, given in corpora.items():
        if given == data.train:
            raise UserError(f"--{split}: is the training text itself; give another, or none: pairs are held out")
        read_pairs(given, data)


def _surveyed(corpus: CorpusConfig, data: DataConfig) -> "Survey":
    """Reads the training text once, and prints what it is."""
    from dist_transformer.data.prepare.report import warn_of_cut_text
    from dist_transformer.data.sources.survey import survey

    with progress_bar() as show:
        found = survey(corpus, data, lambda pairs: show("reading the text", pairs, None))
    print(f"{found.pairs:,} pairs, {found.characters} distinct characters, {found.repeated:.1%} repeat a source text")
    for language, side in zip((data.source_language, data.target_language), found.sides, strict=True):
        length = f"{side.median} tokens in the middle, 1 in 100 over {side.percentile_99} (estimated for 6,000 pieces)"
        print(f"  {language}: {side.script}; {length}")
    warn_of_cut_text("the text", [text for pair in found.sample for text in pair])
    return found


def _ask_held_out(questions: _Questions, given: int | None, found: "Survey") -> int:
    most = len(found.sample) // 4
    if most < 1:
        raise UserError(f"{len(found.sample)} different pairs of text: expected 4 at least, or --validation and --test")
    proposed = min(MOST_HELD_OUT, most, max(1, found.pairs // HELD_OUT_PART))
    each: int = questions.ask("pairs held out for validation, and as many for the test", given, proposed)
    if not 1 <= each <= most:
        raise UserError(
            f"--held-out: expected 1 to {most}, a quarter of the {len(found.sample)} different pairs with text on both sides "
            f"that were looked at, got {each}; give more text, or --validation and --test"
        )
    return each


def _corpus(source: Path, target: Path | None, columns: tuple[str, str] | None) -> tuple[CorpusConfig, Sequence[str]]:
    """The corpus, and its languages by the names of its files or columns; without such names "source" and "target"."""
    if target is None:
        codes = [name.rpartition(".")[2] for name in columns or SIDES]  # of a nested one: translation.en
        are_codes = all(CODE.fullmatch(code) and not code.isdecimal() for code in codes) and len({*codes}) == 2
        return CorpusConfig(path=str(source.absolute()), columns=columns), codes if are_codes else SIDES
    found = [LANGUAGE.search(path.name) for path in (source, target)]
    return _files(source, target), [match[1] if match else side for match, side in zip(found, SIDES, strict=True)]


def _with_columns(corpus: CorpusConfig, languages: tuple[str, str]) -> CorpusConfig:
    """The corpus; of a .tsv with the languages as columns, if its first line names them. Raises UserError: it has others."""
    from dist_transformer.data.sources.files import table_kind
    from dist_transformer.data.sources.lines import read_lines

    files = local_files("", corpus.path) if corpus.path and not corpus.columns else []
    if not files or table_kind(files[0]) != "tsv":
        return corpus
    names = next(read_lines(files[0]), b"").decode(errors="replace").split("\t")
    if not (has_languages := {*languages} <= {*names}) and len(names) > 2:
        raise UserError(
            f"{files[0]}: expected two columns, or a first line with the names {' and '.join(languages)}; got {len(names)}: "
            f"{', '.join(name[:30] for name in names)}; give --columns 0 1, counted from 0, or its names if it is a header"
        )
    return corpus.model_copy(update={"columns": languages if has_languages else None})


def _files(source: Path, target: Path) -> CorpusConfig:
    return CorpusConfig(source=str(source.absolute()), target=str(target.absolute()))


@contextmanager
def _new_text(data: DataConfig, held_out: "Mapping[str, Sequence[Pair]]", folder: Path, total: int) -> Iterator[None]:
    """Writes the held-out pairs and the others into a new folder; it gets its name, complete, once the block has succeeded."""
    from dist_transformer.data.sources.survey import write_splits

    assert data.train is not None
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = tempfile.TemporaryDirectory(prefix=".", dir=folder.parent)
        with part, progress_bar() as show:
            new = Path(part.name) / "new"
            new.mkdir()
            write_splits(data.train, data, held_out, new, lambda pairs: show("holding out", pairs, total))
            yield
            new.rename(folder)
