"""translate: translates lines; a large file in parts, by any number of ranks."""

import os
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dist_transformer.cli import arguments as options
from dist_transformer.cli.arguments import option_of_search
from dist_transformer.decoding.search_settings import noting_tags, search_settings
from dist_transformer.errors import EXIT_DONE, EXIT_REQUEUE, UserError, say
from dist_transformer.model.search_interface import Engine
from dist_transformer.processes.stop_request import StopRequest

if TYPE_CHECKING:  # at run time this would import torch for every command
    from dist_transformer.decoding.translation_lines import Task

FILES = "Files"
FORM = "What is written"
LINES_LOOKED_AT = 1000


def translate_command(
    model: options.ModelArgument,
    source: Annotated[
        Path | None, typer.Option("--input", help="A file of lines; none: standard input.", rich_help_panel=FILES)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="With --input: complete or not there; resumes after a stop.", rich_help_panel=FILES),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes that share the file on this machine.", rich_help_panel=FILES)
    ] = 1,
    prefix: Annotated[
        Path | None,
        typer.Option(help="A file: for each line, what its translations begin with.", rich_help_panel=FILES),
    ] = None,
    ensemble: options.EnsembleOption = None,
    plugin: options.PluginOption = None,
    engine: Annotated[Engine, typer.Option(help="Who searches: ctranslate2 needs that package.")] = "torch",
    beam: options.BeamOption = None,
    length_penalty: options.PenaltyOption = None,
    n_best: Annotated[int | None, option_of_search("Translations for each line, best first.", min=1)] = None,
    no_repeat_ngram: Annotated[
        int | None, option_of_search("No n-gram of so many tokens twice; 0: any.", min=0)
    ] = None,
    sampling: Annotated[bool | None, option_of_search("Draw tokens, no beam.", "--sampling/--no-sampling")] = None,
    temperature: Annotated[float | None, option_of_search("Sampling: divides logits.")] = None,
    top_k: Annotated[int | None, option_of_search("Sampling: from so many likeliest tokens; 0: all.", min=0)] = None,
    top_p: Annotated[float | None, option_of_search("Sampling: from the likeliest tokens of this probability.")] = None,
    seed: Annotated[int | None, option_of_search("Of sampling.", min=0)] = None,
    too_long: options.TooLongOption = None,
    max_source_tokens: options.MaxSourceOption = None,
    max_tokens: Annotated[int | None, option_of_search("Source tokens times beam in one batch.", min=1)] = None,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Append pairs of words: 0-0 1-2.", rich_help_panel=FORM)
    ] = False,
    mbr: Annotated[
        int | None,
        typer.Option(min=2, help="Of so many (beam or samples) the one most like the others.", rich_help_panel=FORM),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="An object a line: text, score, log-probability.", rich_help_panel=FORM)
    ] = False,
) -> None:
    """Translate standard input to standard output, or a file to a file, a line each, in order; empty lines stay empty.

    With more than one translation for each line: NUMBER ||| TEXT ||| log_probability= L ||| SCORE, numbers from 0.
    """
    if mbr is not None and n_best is not None:
        raise UserError(f"--mbr {mbr}: writes one translation a line, of so many; drop --n-best {n_best}")
    if mbr is not None and find_spec("fastchrf") is None:
        raise UserError(f"--mbr {mbr}: needs the package fastchrf: pip install 'dist-transformer[mbr]'")
    of_beam = {"beam_size": beam, "length_penalty": length_penalty, "no_repeat_ngram_size": no_repeat_ngram}
    of_draws = {"sampling": sampling, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    limits = {"too_long": too_long, "max_source_tokens": max_source_tokens, "max_tokens": max_tokens}
    settings = search_settings(model, n_best=mbr or n_best, **of_beam, **of_draws, **limits)
    if settings.too_long == "split" and alignment:
        raise UserError("--too-long split: a line that is cut has no alignment of its own; drop one of them")
    if engine == "ctranslate2" and alignment:
        raise UserError("--engine ctranslate2: alignment is read from our own model; drop one of them")
    if plugin is not None and (engine == "ctranslate2" or alignment):
        raise UserError("--plugin: a network of your own has no alignment, and CTranslate2 does not know it")
    if (source is None) != (output is None):
        raise UserError("--input and --output belong together: give both, or neither")
    if source is None and sys.stdin is None:
        raise UserError("standard input: is closed, expected lines: give < FILE, or --input and --output")
    if source is None and ranks > 1:
        raise UserError(f"--ranks {ranks}: processes share a file, not standard input; give --input and --output")
    if output is not None and ranks > 1 and "RANK" not in os.environ:
        sys.exit(_start_ranks(output, ranks))
    stop = StopRequest(answer="stopping after this batch")
    if output is not None:
        stop.listen()  # before the slow imports
    from dist_transformer.decoding.sharded_files import numbered_lines
    from dist_transformer.decoding.translate_file import translate_file
    from dist_transformer.decoding.translation_lines import Task

    if source is not None and source.is_file() and os.environ.get("RANK", "0") == "0":
        list(noting_tags(model, islice(numbered_lines(source), LINES_LOOKED_AT)))
    task = Task([model, *(ensemble or [])], settings, engine, prefix, alignment, as_json, plugin, mbr is not None)
    if source is None or output is None:
        _translate_stream(task)
    else:
        translate_file(task, source, output, stop)


def _start_ranks(output: Path, num_ranks: int) -> int:
    """Runs this command as `num_ranks` processes; returns the exit code. EXIT_REQUEUE: one was stopped, start again."""
    from dist_transformer.decoding.sharded_files import is_complete
    from dist_transformer.processes.launching import start_local_ranks

    code = start_local_ranks(sys.argv[1:], num_ranks, program=[sys.executable, "-m", "dist_transformer"], are_held=True)
    return EXIT_REQUEUE if code == EXIT_DONE and not is_complete(output) else code


def _translate_stream(task: "Task") -> None:
    from dist_transformer.decoding.engines import folders_of, open_search
    from dist_transformer.decoding.sharded_files import decoded_lines, numbered_lines
    from dist_transformer.decoding.translation_lines import translated

    options.write_utf8()
    if sys.stdin.isatty():
        say("reading lines; Ctrl-D ends the input and starts the translation")
    search = open_search(task.engine, folders_of(task.engine, task.models), task.settings, task.plugin)
    prefixes = None if task.prefix is None else numbered_lines(task.prefix)
    lines = noting_tags(Path(task.models[0]), decoded_lines(sys.stdin.buffer, "standard input"))
    for text in translated(task, search, lines, prefixes):
        print(text, flush=True)
