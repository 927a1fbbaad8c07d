"""Gain of a shortlist for CTranslate2 on one core: sentences per CPU-second and BLEU of a model with and without one.

    python benchmarks/shortlist.py runs/student --shortlist runs/student/lexicon.npz --source test.en --reference test.de
    python benchmarks/shortlist.py model --shortlist train.en train.de --source test.en --reference test.de

`--shortlist` is that of `export`. All sentences have the most frequent tokens, 100 in `export` and in Marian; `--frequent`
tries other numbers. Sentences are in batches of similar length, the longest first, as in `translate`; tokenizing is not timed.
CTranslate2 takes the rows of the output layer that any sentence of a batch may need, so larger batches gain less.
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from common import (
    Figures,
    Rounds,
    Stopwatch,
    arguments_of,
    begin,
    finish,
    interleaved,
    markdown_table,
    median,
    median_ratio,
    ratio_range,
)

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.ctranslate2_search import CTranslate2Searcher
from dist_transformer.decoding.metrics import corpus_scores
from dist_transformer.interop.ctranslate2_export import export_ctranslate2, read_vocabularies
from dist_transformer.interop.model_folder import load_model_folder
from dist_transformer.interop.shortlist import FREQUENT, VOCABULARY_MAP, read_lexicon, vocabulary_map
from dist_transformer.model.search_interface import SearchInput

NONE = "none"
Map = dict[str, list[str]]
"""Target tokens by source token; of "" those of all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a run folder, or a model folder")
    parser.add_argument("--shortlist", nargs="+", required=True, help="a lexicon.npz, or two texts")
    parser.add_argument("--source", type=Path, required=True, help="sentences, one a line")
    parser.add_argument("--reference", type=Path, required=True, help="their translations")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--frequent", type=int, nargs="+", default=[FREQUENT, 500], help="tokens of all sentences")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="sentences of a batch")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    arguments = arguments_of(parser, rounds=3)
    found = begin(threads=1)
    with tempfile.TemporaryDirectory() as temporary:
        figures = measure(arguments, Path(temporary))
    finish(arguments, found, figures)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Rounds]:
    inner = arguments.model / "model"
    loaded = load_model_folder(inner if inner.is_dir() else arguments.model)
    tokenizer = Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)
    lexicon, maps = read_lexicon([*map(Path, arguments.shortlist)], loaded), dict[str, Map]()
    export_ctranslate2(loaded, folder / NONE, arguments.quantization)
    for most in arguments.frequent:
        name = f"{most} frequent"
        export_ctranslate2(loaded, folder / name, arguments.quantization)
        text = vocabulary_map(lexicon, *read_vocabularies(folder / name), most=most)
        (folder / name / VOCABULARY_MAP).write_text(text, encoding="utf-8")
        rows_of_text = (line.split("\t") for line in text.removesuffix("\n").split("\n"))
        maps[name] = {source: targets.split() for source, targets in rows_of_text}
    sizes = ", ".join(f"{name}: {size(folder / name) / 1e6:.2f} MB" for name in (NONE, *maps))
    lines, references = (
        path.read_text(encoding="utf-8").splitlines()[: arguments.sentences]
        for path in (arguments.source, arguments.reference)
    )
    ids = tokenizer.encode_source(lines)
    order = sorted(range(len(ids)), key=lambda n: -len(ids[n]))
    vocabulary = loaded.information.target_vocabulary
    print(f"\n{len(ids)} sentences, {sum(map(len, ids)):,} source tokens; {vocabulary:,} target tokens. {sizes}\n")
    results, rows = dict[str, Rounds](), []
    for beam in arguments.beams:
        config = DecodingConfig(beam_size=beam)
        searchers = {
            name: CTranslate2Searcher(folder / name, tokenizer.special, config, torch.device("cpu"))
            for name in (NONE, *maps)
        }
        for batch in arguments.batches:
            batches = [order[first : first + batch] for first in range(0, len(order), batch)]
            inputs = [[SearchInput(ids[n], [], n) for n in members] for members in batches]
            cases = {name: partial(timed, searcher, inputs) for name, searcher in searchers.items()}
            texts = {  # also warms up
                name: in_order(order, [tokenizer.decode_target(each) for each in translate(searcher, inputs)])
                for name, searcher in searchers.items()
            }
            rounds = results[f"batch {batch}, beam {beam}"] = interleaved(cases, arguments.rounds)
            for name, samples in rounds.items():
                outputs = (
                    [num_outputs(maps[name], tokenizer, each) for each in inputs] if name in maps else [vocabulary]
                )
                bleu = corpus_scores(texts[name], [references], loaded.information.target_language)["bleu"]
                same = sum(a == b for a, b in zip(texts[name], texts[NONE], strict=True)) / len(order)
                rows.append(
                    [
                        str(batch),
                        str(beam),
                        name,
                        f"{sum(outputs) / len(outputs):,.0f}",
                        f"{median(samples, 'sentences_per_cpu_second'):.1f}",
                        f"{median_ratio(samples, rounds[NONE], 'sentences_per_cpu_second'):.2f}x",
                        ratio_range(samples, rounds[NONE], "sentences_per_cpu_second"),
                        f"{bleu:.2f}",
                        f"{same:.0%}",
                    ]
                )
    header = [
        "batch",
        "beam",
        "shortlist",
        "output tokens",
        "sentences/CPU-s",
        "to none",
        "range",
        "BLEU",
        "same as none",
    ]
    print(markdown_table(header, rows), flush=True)
    return results


def num_outputs(targets_of: Map, tokenizer: Tokenizer, batch: Sequence[SearchInput]) -> int:
    """Number of target tokens that a batch may produce."""
    sources = {"", *(piece for each in batch for piece in tokenizer.source_pieces(each.source))}
    return len({target for source in sources for target in targets_of.get(source, ())})


def in_order(order: Sequence[int], texts: Sequence[str]) -> list[str]:
    placed = dict(zip(order, texts, strict=True))
    return [placed[n] for n in range(len(order))]


def translate(searcher: CTranslate2Searcher, batches: Sequence[Sequence[SearchInput]]) -> list[list[int]]:
    return [best[0].tokens for batch in batches for best in searcher.search(batch)]


def timed(searcher: CTranslate2Searcher, batches: Sequence[Sequence[SearchInput]]) -> Figures:
    clock = Stopwatch(with_descendants=False)
    sentences = len(translate(searcher, batches))
    wall, cpu = clock.read()
    return {"sentences_per_second": sentences / wall, "sentences_per_cpu_second": sentences / cpu}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


if __name__ == "__main__":
    main()
