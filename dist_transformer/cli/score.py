"""score: probabilities that a model assigns to given translations; rerank: chooses from n-best lists by scores that another
program made."""

import json
import math
import re
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

import typer

from dist_transformer.cli.arguments import EnsembleOption, ModelArgument, write_utf8
from dist_transformer.decoding.search_settings import noting_tags, search_settings
from dist_transformer.errors import UserError

_LINE = re.compile(r"(\d+) \|\|\| (.*) \|\|\| log_probability= .*\n(-inf|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


def score_command(
    model: ModelArgument,
    source: Annotated[Path, typer.Option(help="Source file, a sentence a line.")],
    target: Annotated[Path, typer.Option(help="Its translations, line by line.")],
    ensemble: EnsembleOption = None,
    max_source_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longest line of either file, in tokens (default: as for translate).")
    ] = None,
    too_long: Annotated[
        Literal["refuse", "lowest"], typer.Option(help="Longer pairs end the command, or have the score -inf.")
    ] = "refuse",
    per_token: Annotated[
        bool,
        typer.Option("--per-token", help="Of each token of the line, apart by spaces; the end of sentence is last."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="An object a line: sum, pieces, and each of them.")] = False,
) -> None:
    """Print the log-probability (natural) of given translations, a line each, and the perplexity of all on stderr.

    The text is cut into tokens as in training, which may not be the tokens that a search found the same text with.
    """
    from dist_transformer.decoding.loaded_model import load_models, model_folder_of
    from dist_transformer.decoding.scoring import score_pairs
    from dist_transformer.decoding.sharded_files import LineReader, same_lines
    from dist_transformer.distributed.group import device_of_rank

    lines, translations = LineReader(source), LineReader(target)
    num_sources = same_lines(source, target)
    settings = search_settings(model, max_source_tokens=max_source_tokens)
    write_utf8()
    loaded = load_models([model_folder_of(folder) for folder in (model, *(ensemble or []))], settings)
    sources = noting_tags(model, (lines.read(number, 1)[0] for number in range(num_sources)))
    pairs = ((text, translations.read(number, 1)[0]) for number, text in enumerate(sources))
    total, num_tokens, num_longer = 0.0, 0, 0
    files = None if too_long == "lowest" else f"{source} and {target}, "
    longest = settings.max_source_tokens
    for ids, found in score_pairs(loaded.models, loaded.tokenizer, pairs, device_of_rank(), longest, files):
        known = [value for value in found if value != -math.inf]
        total, num_tokens, num_longer = total + sum(known), num_tokens + len(known), num_longer + (not known)
        if as_json:
            pieces = loaded.tokenizer.target_pieces(ids)
            record = {"log_probability": sum(known) if known else None, "pieces": pieces, "log_probabilities": known}
            print(json.dumps(record, ensure_ascii=False), flush=True)
        else:
            print(" ".join(f"{value:.4f}" for value in (found if per_token else [sum(found)])), flush=True)
    if num_tokens:
        mean, longer = total / num_tokens, f", {num_longer:,} of them too long" if num_longer else ""
        tokens = f"{num_tokens:,} target tokens, log-probability {mean:.4f} per token"
        print(f"{num_sources:,} pairs{longer}, {tokens}, perplexity {math.exp(-mean):.2f}", file=sys.stderr)


def rerank_command(
    n_best: Annotated[Path, typer.Argument(help="What translate --n-best wrote.")],
    scores: Annotated[Path, typer.Argument(help="A number for each of its lines, higher is better.")],
) -> None:
    """Print the translation of each line that has the highest score in a file, of equals the first."""
    from dist_transformer.decoding.sharded_files import numbered_lines

    best: list[tuple[float, str]] = []
    for number, (line, score) in enumerate(zip_longest(numbered_lines(n_best), numbered_lines(scores)), start=1):
        if line is None or score is None:
            raise UserError(f"{n_best if line is None else scores}: ends before line {number}; give each line a score")
        if (found := _LINE.fullmatch(f"{line}\n{score.strip()}")) is None:
            form = "NUMBER ||| TEXT ||| log_probability= ..."
            raise UserError(
                f"line {number}: expected {form} in {n_best}, got {line!r}; a number in {scores}, got {score!r}"
            )
        candidate = float(found[3]), found[2]
        if found[1] == str(len(best)):
            best.append(candidate)
        elif found[1] == str(len(best) - 1):
            best[-1] = max(best[-1], candidate, key=lambda each: each[0])
        else:
            raise UserError(
                f"{n_best}, line {number}: expected {len(best)} as the next number, got {found[1]}: translate "
                "numbers the lines of one input from 0, without gaps; rerank each list by itself; those of several models for "
                "one input are merged by: sort -n -s LISTS"
            )
    write_utf8()
    for _, text in best:
        print(text)
