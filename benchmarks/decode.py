"""Speed of the search of `translate`: ours, CTranslate2 and Hugging Face `generate` on the same weights and sentences.

    python benchmarks/decode.py                                     # random weights, sizes small and base
    python benchmarks/decode.py --model runs/my --source test.en    # a trained model on real sentences

The model is written as a Marian folder and as a CTranslate2 folder by the package's own adapters. Every engine receives
the same token ids in the same batches, in a process of its own: in one process the threads of one slow down those of
the others. Tokenizing is not timed. The length penalty is 0, which has the same meaning in all three. With random
weights the end of sentence is made impossible, so that all translations have the same length; with a trained model they
end normally.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

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

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.schema import DecodingConfig, ModelConfig
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.decoding.cpu_packed import packed_for_decoding
from dist_transformer.decoding.ctranslate2_search import CTranslate2Searcher
from dist_transformer.decoding.search import TorchSearcher, pad_together
from dist_transformer.interop.ctranslate2_export import export_ctranslate2
from dist_transformer.interop.marian import export_marian
from dist_transformer.interop.model_folder import (
    LoadedModel,
    ModelInformation,
    TokenizerFiles,
    load_model_folder,
    save_model_folder,
)
from dist_transformer.model.search_interface import SearchInput
from dist_transformer.model.transformer import Transformer

Ids = list[list[int]]
Engine = Callable[[Ids], Ids]
"""Function from source ids of a batch to target ids, without eos."""
EXTRA_TOKENS = 50
RANDOM_LENGTH = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder, or a run folder with one; none: random weights")
    parser.add_argument("--source", type=Path, help="sentences for --model, one a line")
    parser.add_argument("--presets", nargs="+", default=["small", "base"], help="sizes of the random models")
    parser.add_argument("--vocabulary", type=int, default=8000, help="pieces of the random models")
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--threads", type=int, default=2)
    arguments = arguments_of(parser, rounds=3)
    found, figures = begin(arguments.threads), {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, folder in model_folders(arguments, Path(temporary)):
            figures[name] = measure(name, folder, arguments, Path(temporary) / f"{name}-exports")
    finish(arguments, found, figures)


def model_folders(arguments: argparse.Namespace, temporary: Path) -> list[tuple[str, Path]]:
    if arguments.model is not None:
        inner = arguments.model / "model"
        return [(arguments.model.name, inner if inner.is_dir() else arguments.model)]
    return [(preset, random_model(preset, arguments.vocabulary, temporary)) for preset in arguments.presets]


def random_model(preset: str, vocabulary: int, temporary: Path) -> Path:
    """Writes a model folder whose translations never end by themselves. Its tokenizer only provides a name per id."""
    model_file = temporary / "pieces.model"
    names = [f"<{number}>" for number in range(vocabulary - 400)]  # the demo corpus yields fewer pieces
    text = (sentence for pair in demo_pairs("validation") for sentence in pair)
    train_tokenizer(text, TokenizerConfig(vocabulary_size=vocabulary), model_file, names)
    tokenizer = Tokenizer.load(model_file)
    rows = tokenizer.source_vocabulary
    torch.manual_seed(1)
    config = ModelConfig(preset=preset, output_bias=True)
    model = Transformer(config, rows, rows, tokenizer.pad_id)
    with torch.no_grad():
        model.output_bias[tokenizer.eos_id] = -1e4
    information = ModelInformation(rows, rows, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, "en", "de", 0)
    folder = temporary / preset
    save_model_folder(folder, dict(model.named_parameters()), config, TokenizerFiles(model_file), information)
    return folder


@dataclass(frozen=True)
class Case:
    """Settings of a process that translates.

    Attributes:
        folder: folder of the model.
        exports: folder with the model in Marian's and CTranslate2's formats.
        extra_tokens: tokens by which a translation may be longer than its source.
    """

    folder: Path
    exports: Path
    beam: int
    extra_tokens: int


def measure(name: str, folder: Path, arguments: argparse.Namespace, exports: Path) -> dict[str, Rounds]:
    """Measures every engine, by batch and beam."""
    loaded = load_model_folder(folder)
    export_marian(loaded, exports / "marian")
    export_ctranslate2(loaded, exports / "ctranslate2")
    sentences = source_ids(loaded, arguments)
    extra_tokens = EXTRA_TOKENS if arguments.source is not None else 0
    print(f"\n## {name}: {len(sentences)} sentences, {sum(map(len, sentences)):,} source tokens\n")
    results, rows = {}, []
    with ExitStack() as stack:
        processes = {engine: stack.enter_context(process(arguments.threads)) for engine in ENGINES}
        for batch in arguments.batches:
            batches = in_batches(sentences, batch)
            for beam in arguments.beams:
                case = Case(folder, exports, beam, extra_tokens)
                found = {  # also warms up
                    engine: own.submit(translate, engine, case, batches[:1]).result()
                    for engine, own in processes.items()
                }
                cases = {engine: partial(_result, own, engine, case, batches) for engine, own in processes.items()}
                rounds = interleaved(cases, arguments.rounds)
                results[f"batch {batch}, beam {beam}"] = rounds
                rows += table_rows(batch, beam, rounds, found)
    header = [
        "batch",
        "beam",
        "engine",
        "sentences/s",
        "tokens/s",
        "tokens/CPU-s",
        "ours is",
        "range",
        "same first batch",
    ]
    print(markdown_table(header, rows), flush=True)
    return results


def process(threads: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,))


def _result(own: ProcessPoolExecutor, engine: str, case: Case, batches: Sequence[Ids]) -> Figures:
    return own.submit(timed, engine, case, batches).result()


def table_rows(batch: int, beam: int, rounds: Rounds, found: dict[str, Ids]) -> list[list[str]]:
    rows = []
    for engine, samples in rounds.items():
        same = sum(a == b for a, b in zip(found[engine], found[OURS], strict=True)) / len(found[OURS])
        rows.append(
            [
                str(batch),
                str(beam),
                engine,
                f"{median(samples, 'sentences_per_second'):.1f}",
                f"{median(samples, 'tokens_per_second'):,.0f}",
                f"{median(samples, 'tokens_per_cpu_second'):,.0f}",
                f"{median_ratio(rounds[OURS], samples, 'tokens_per_second'):.2f}x",
                ratio_range(rounds[OURS], samples, "tokens_per_second"),
                f"{same:.0%}",
            ]
        )
    return rows


def source_ids(loaded: LoadedModel, arguments: argparse.Namespace) -> Ids:
    """Returns the source sentences as ids, longest first."""
    files, information = loaded.tokenizer_files, loaded.information
    if arguments.source is None:
        ids = torch.randint(4, information.source_vocabulary, (arguments.sentences, RANDOM_LENGTH - 1)).tolist()
        return [[*sentence, information.eos_id] for sentence in ids]
    lines = arguments.source.read_text(encoding="utf-8").splitlines()[: arguments.sentences]
    return sorted(Tokenizer.load(files.source, files.target).encode_source(lines), key=len, reverse=True)


def in_batches(sentences: Ids, size: int) -> list[Ids]:
    return [sentences[first : first + size] for first in range(0, len(sentences), size)]


def timed(engine: str, case: Case, batches: Sequence[Ids]) -> Figures:
    clock = Stopwatch(with_descendants=False)
    translations = translate(engine, case, batches)
    wall, cpu = clock.read()
    tokens = sum(len(ids) + 1 for ids in translations)
    return {
        "sentences_per_second": len(translations) / wall,
        "tokens_per_second": tokens / wall,
        "tokens_per_cpu_second": tokens / cpu,
    }


def translate(engine: str, case: Case, batches: Sequence[Ids]) -> Ids:
    search = engine_of(engine, case)
    return [ids for batch in batches for ids in search(batch)]


@cache
def engine_of(name: str, case: Case) -> Engine:
    return ENGINES[name](case)


@cache
def load(folder: Path) -> LoadedModel:
    return load_model_folder(folder)


def search_settings(case: Case) -> dict[str, Any]:
    known = load(case.folder).information
    config = DecodingConfig(beam_size=case.beam, length_penalty=0.0, max_extra_tokens=case.extra_tokens)
    special = SpecialTokens(known.bos_id, known.eos_id, known.pad_id)
    return {"special": special, "config": config, "device": torch.device("cpu")}


def ours(case: Case) -> Engine:
    model = packed_for_decoding(load(case.folder).model)
    return _of_searcher(TorchSearcher([model], **search_settings(case)))


def ctranslate2(case: Case) -> Engine:
    return _of_searcher(CTranslate2Searcher(case.exports / "ctranslate2", **search_settings(case)))


def _of_searcher(searcher: TorchSearcher | CTranslate2Searcher) -> Engine:
    def search(batch: Ids) -> Ids:
        inputs = [SearchInput(ids, [], number) for number, ids in enumerate(batch)]
        return [found[0].tokens for found in searcher.search(inputs)]

    return search


def hugging_face(case: Case) -> Engine:
    import transformers

    model = transformers.MarianMTModel.from_pretrained(case.exports / "marian").eval()
    known = load(case.folder).information

    @torch.inference_mode()
    def generate(batch: Ids) -> Ids:
        source_BS = pad_together(batch, known.pad_id)
        found = model.generate(
            input_ids=source_BS,
            attention_mask=source_BS != known.pad_id,
            num_beams=case.beam,
            do_sample=False,
            length_penalty=0.0,
            early_stopping=False,
            max_new_tokens=source_BS.shape[1] + case.extra_tokens,
        )
        special = {known.pad_id, known.bos_id, known.eos_id}
        return [[token for token in row if token not in special] for row in found.tolist()]

    return generate


OURS = "ours"
ENGINES: dict[str, Callable[[Case], Engine]] = {
    OURS: ours,
    "Hugging Face generate": hugging_face,
    "CTranslate2": ctranslate2,
}


if __name__ == "__main__":
    main()
