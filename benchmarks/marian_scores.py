"""Scores of the same translations by this program and by Marian itself (pymarian), both ways, in fp32 on one core.

    python benchmarks/marian_scores.py --work /tmp/marian      # some minutes; pymarian is 600 MB, in an environment there

Exported: models that this program trains on the demonstration corpus (`model.positions: marian`) and writes with
`export --to marian-npz`; `pymarian score` and our `score` then score the same held-out pairs. Imported: models that
`pymarian train` trains and saves, taken in by `import --from marian-npz`. A figure is the largest difference of a sentence's
log-probability. Beside it: how many lines a beam of 1 translates the same; what never ends is cut by each program elsewhere.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common

sys.path.append(str(Path(__file__).parent / "peers"))
from environments import NotInstalled, frozen, python_of
from toolkits import TOOLKITS

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.decoding.loaded_model import LoadedTranslator

LIMIT = 1e-4
"""Largest difference of a sentence's log-probability that counts as equal."""
DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo.yaml"
TRAINED_HERE = {
    "ReLU, all embeddings tied": (),
    "SiLU, output bias, a vocabulary for each side": (
        *("model.activation=silu", "model.output_bias=true", "model.shared_embeddings=false", "tokenizer.shared=false"),
        "tokenizer.vocabulary_size=600",
    ),
    "base: 6 + 6 layers, d_model 512": (
        *("model.preset=base", "model.d_ff=2048", "model.num_encoder_layers=6", "model.num_decoder_layers=6"),
        *(
            "training.max_steps=12",
            "schedule.warmup_steps=10",
            "optimizer.learning_rate=0.0005",
            "data.max_tokens=1024",
        ),
    ),
}
TRAINED_BY_MARIAN = {
    "ReLU, all embeddings tied": ("--tied-embeddings-all", "--transformer-ffn-activation", "relu"),
    "swish, a vocabulary for each side, output tied": ("--tied-embeddings",),
    "swish, nothing tied, 6 + 6 layers": ("--enc-depth", "6", "--dec-depth", "6"),
}
MARIAN = (
    *("--type", "transformer", "--dim-emb", "128", "--transformer-dim-ffn", "512", "--transformer-heads", "4"),
    *("--learn-rate", "0.001", "--lr-warmup", "100", "--label-smoothing", "0.1"),
    *("--mini-batch", "64", "--cpu-threads", "1", "--workspace", "1000", "--seed", "1", "--save-freq", "100000"),
    *("--dim-vocabs", "600", "600", "--sentencepiece-max-lines", "20000", "--quiet-translation", "--relative-paths"),
)


class Text:
    """Files of the demonstration corpus: pairs to train Marian with, and held-out pairs to score."""

    def __init__(self, folder: Path, num_scored: int) -> None:
        self.train = self._written(folder, "train", 20_000)
        self.scored = self._written(folder, "test", num_scored)
        self.source = self.scored[0].read_text(encoding="utf-8").splitlines()

    @staticmethod
    def _written(folder: Path, split: str, most: int) -> tuple[Path, Path]:
        pairs = [pair for _, pair in zip(range(most), demo_pairs(split), strict=False)]
        paths = folder / f"{split}.en", folder / f"{split}.de"
        for path, lines in zip(paths, zip(*pairs, strict=True), strict=True):
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return paths


def run(command: Sequence[object], text: str | None = None) -> str:
    """Returns what a command prints. SystemExit: it failed, with the end of its messages."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in command], input=text, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def ours(*arguments: object, text: str | None = None) -> str:
    """Returns what our command prints."""
    return run([sys.executable, "-m", "dist_transformer", *arguments], text)


def python_with(peer: str, package: str, work: Path) -> Path:
    """The python of the environment of a toolkit under `work`; prints its version. SystemExit: it cannot be installed."""
    work.mkdir(parents=True, exist_ok=True)
    try:
        python = python_of(next(each for each in TOOLKITS if each.name == peer), work)
    except NotInstalled as error:
        raise SystemExit(f"{peer} cannot be installed: {error}") from None
    print(", ".join(line for line in frozen(python) if line.startswith(package)))
    return python


def compared(pymarian: Path, model: Path, marian: Path, vocabularies: Sequence[Path], text: Text) -> dict[str, float]:
    """The figures of one model: `model` is its folder here, `marian` its .npz there."""
    found = [json.loads(line) for line in ours("score", model, "--source", text.scored[0], "--target", text.scored[1],
                                               "--json").splitlines()]  # fmt: skip
    common_options = ["--cpu-threads", "1", "--workspace", "1000", "--quiet"]
    there = run([pymarian, "score", "-m", marian, "-v", *vocabularies, "-t", *text.scored, *common_options])
    theirs = [float(line) for line in there.split()]
    differences = [abs(record["log_probability"] - score) for record, score in zip(found, theirs, strict=True)]
    greedy = ["--beam-size", "1", "--mini-batch", "16", "--quiet-translation"]
    decoded = run(
        [pymarian, "decode", "-m", marian, "-v", *vocabularies, *common_options, *greedy],
        "".join(f"{line}\n" for line in text.source),
    ).splitlines()
    translated = list(LoadedTranslator(model, DecodingConfig(beam_size=1)).translate(text.source))
    return {
        "pairs": len(found),
        "mean": sum(theirs) / len(theirs),
        "tokens": sum(len(record["pieces"]) for record in found),
        "largest": max(differences),
        "same_lines": sum(a == b for a, b in zip(decoded, translated, strict=True)),
    }


def exported(name: str, folder: Path, pymarian: Path, text: Text, steps: int) -> dict[str, float]:
    """Trains here, exports, and compares."""
    shutil.rmtree(folder, ignore_errors=True)
    settings = (
        f"training.max_steps={steps}",
        f"schedule.warmup_steps={min(200, steps)}",
        "model.positions=marian",
        "validation.translate=false",
    )
    run_name = ("run.name=trained", f"run.root={folder}", "tracking.enabled=false", "checkpoints.every_steps=1000")
    ours("train", DEMO, *run_name, *settings, *TRAINED_HERE[name], "--ranks", "1")
    ours("export", folder / "trained", folder / "theirs", "--to", "marian-npz")
    vocabularies = [folder / "theirs" / f"{side}.spm" for side in ("source", "target")]
    return compared(pymarian, folder / "trained/model", folder / "theirs/model.npz", vocabularies, text)


def imported(name: str, folder: Path, pymarian: Path, text: Text, steps: int) -> dict[str, float]:
    """Trains with Marian, imports, and compares."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "theirs").mkdir(parents=True)
    model, sides = folder / "theirs/model.npz", ("source", "target")
    shared = "--tied-embeddings-all" in TRAINED_BY_MARIAN[name]
    vocabularies = [folder / "theirs" / f"{'vocab' if shared else side}.spm" for side in sides]
    depth = () if "--enc-depth" in TRAINED_BY_MARIAN[name] else ("--enc-depth", "2", "--dec-depth", "2")
    files = ("-m", model, "-v", *vocabularies, "-t", *text.train, "--tempdir", folder, "--after-batches", steps)
    run([pymarian, "train", *MARIAN, *depth, *TRAINED_BY_MARIAN[name], *files, "--overwrite"])
    ours("import", folder / "theirs", folder / "ours", "--from", "marian-npz")
    return compared(pymarian, folder / "ours", model, vocabularies, text)


def finish(arguments: argparse.Namespace, found: Mapping[str, Any], figures: Mapping[str, dict[str, float]]) -> None:
    """Prints the worst figure and keeps all. SystemExit: it is above the limit."""
    worst = max(each["largest"] for each in figures.values())
    print(f"\nLargest difference of a sentence's log-probability: {worst:.1e}, limit {LIMIT:.0e}")
    common.finish(arguments, found, figures)
    if worst > LIMIT:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="folder for pymarian's environment, kept; default: a temporary one")
    parser.add_argument("--pairs", type=int, default=500, help="held-out pairs that are scored")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model (base: 12)")
    parser.add_argument("--only", choices=["exported", "imported"])
    arguments = common.arguments_of(parser, rounds=1)
    found = common.begin(threads=1)
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).absolute()
        python = python_with("Marian", "pymarian", work)
        text, figures = Text(work, arguments.pairs), {}
        for kind, cases, compare in (("exported", TRAINED_HERE, exported), ("imported", TRAINED_BY_MARIAN, imported)):
            for number, name in enumerate(cases if arguments.only in (None, kind) else ()):
                folder = work / f"{kind}{number}"
                figures[f"{kind}: {name}"] = compare(name, folder, python.with_name("pymarian"), text, arguments.steps)
                print(f"{kind}: {name}: {figures[f'{kind}: {name}']['largest']:.1e}", flush=True)
    rows = [
        [
            *(name, f"{each['pairs']:,}", f"{each['tokens']:,}", f"{each['mean']:.2f}", f"{each['largest']:.1e}"),
            f"{each['same_lines']:,}",
        ]
        for name, each in figures.items()
    ]
    header = ["model", "pairs", "tokens", "mean score", "largest difference", "same lines, beam 1"]
    print(f"\n{common.markdown_table(header, rows)}")
    finish(arguments, found, figures)


if __name__ == "__main__":
    main()
