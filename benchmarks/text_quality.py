"""BLEU with and without cleaning and modified text: one small model, trained for as many steps on other text each time.

    python benchmarks/text_quality.py --source train.en.gz --target train.de.gz --validation val.en.gz val.de.gz \\
        --test test.en.gz test.de.gz                      # twenty minutes on two cores with Multi30k
    ... --steps 2500 --only clean "clean, modified"       # modifiers pay in longer trainings

The runs: the text as it is; with noise (a share of it again for each kind, made as benchmarks/cleaning.py makes it: sides in
the wrong language, shifted pairs, near-duplicates, markup, symbols, repetitions); with the same noise and the rules of
data.filters, shifted pairs by scores of an IBM Model 1; the text as it is with data.modifiers. Each is scored on the test
set, and this again in upper case and with typos. p: of a paired bootstrap of sacreBLEU against the first run, 1,000 samples.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import common
import yaml
from cleaning import NOISE, Pair, model_1_scores
from marian_scores import ours
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.data.sources.corpus import read_pairs

KINDS = ("language", "scores", "near_duplicates", "markup", "letters", "repeated")
RULES = (
    "markup",
    "letters",
    "digits",
    "punctuation",
    "repeated",
    "numbers",
    "language",
    "duplicates",
    "near_duplicates",
)
MODIFIERS = ("upper_case", "typos")


def write(folder: Path, name: str, pairs: list[Pair]) -> dict[str, str]:
    """Writes two files of text, and returns them as a corpus of a configuration."""
    for side, language in enumerate(("en", "de")):
        (folder / f"{name}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    return {"source": f"{name}.en", "target": f"{name}.de"}


def configurations(folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The settings of each run; writes the text with noise."""
    corpus = CorpusConfig(source=str(arguments.source.absolute()), target=str(arguments.target.absolute()))
    text: list[Pair] = list(zip(*read_pairs(corpus, DataConfig()), strict=True))
    draw, rows = random.Random(1), list(text)
    for kind in KINDS:
        chosen = draw.sample(text, int(len(text) * arguments.noise))
        rows += [(a.replace("\n", " "), b.replace("\n", " ")) for a, b in NOISE[kind](chosen, draw)]
    draw.shuffle(rows)
    files = {"clean": write(folder, "clean", text), "noisy": write(folder, "noisy", rows)}
    (folder / "scores.txt").write_text("".join(f"{score:.6f}\n" for score in model_1_scores(rows)), encoding="utf-8")
    steps = arguments.steps
    held = {
        name: dict(zip(("source", "target"), map(str, getattr(arguments, name)), strict=True))
        for name in ("validation", "test")
    }
    data = {
        "source_language": "en",
        "target_language": "de",
        "root": str(folder),
        "lanes": 2,
        "max_tokens": 4096,
        **held,
    }
    common_settings = {
        "tokenizer": {"vocabulary_size": 8000},
        "model": {"preset": "tiny", "dropout": 0.1, "norm": "pre"},
        "optimizer": {"learning_rate": 0.003},
        "schedule": {"name": "cosine", "warmup_steps": steps // 10},
        "training": {"max_steps": steps, "precision": arguments.precision},
        "validation": {"every_steps": steps, "translate": False},
        "checkpoints": {"every_steps": steps // 20, "keep_last": 4, "average_last": 3},
        "tracking": {"enabled": False},
    }
    rules = {"scores": {"scores.txt": 0.0}, "rules": dict.fromkeys(RULES, True)}
    shares = {"upper_case": 0.07, "title_case": 0.05, "no_final_punctuation": 0.2, "typos": 0.2}
    of_each = {
        "clean": {"train": files["clean"]},
        "noisy": {"train": files["noisy"]},
        "noisy, cleaned": {"train": files["noisy"], "filters": rules},
        "clean, modified": {"train": files["clean"], "on_the_fly": True, "modifiers": shares},
    }
    return {
        name: {**common_settings, "data": {**data, "prepared": str(folder / f"prepared{number}"), **given}}
        for number, (name, given) in enumerate(of_each.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "target"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="training text")
    for name in ("validation", "test"):
        parser.add_argument(f"--{name}", type=lambda p: Path(p).absolute(), nargs=2, required=True, metavar="FILE")
    parser.add_argument("--noise", type=float, default=0.15, help="share of the text, for each of six kinds")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--only", nargs="+", metavar="RUN", help="names of the runs, the one to compare with first")
    parser.add_argument("--precision", default="bf16")
    arguments = common.arguments_of(parser, rounds=1)
    found, figures = common.begin(1), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        test = CorpusConfig(source=str(arguments.test[0]), target=str(arguments.test[1]))
        sources, references = (list(side) for side in read_pairs(test, DataConfig()))
        translations: dict[str, list[str]] = {}
        runs = configurations(folder, arguments)
        for name in arguments.only or runs:
            settings, number = runs[name], [*runs].index(name)
            path, trained = folder / f"{number}.yaml", folder / f"run{number}"
            settings["run"] = {"name": trained.name, "root": str(folder)}
            path.write_text(yaml.safe_dump(settings), encoding="utf-8")
            ours("train", path, "--ranks", 2)
            said = folder / f"{number}.json"
            ours("evaluate", trained, "--output", said, *(word for each in MODIFIERS for word in ("--modified", each)))
            scores = json.loads(said.read_text(encoding="utf-8"))
            translations[name] = ours("translate", trained, text="".join(f"{line}\n" for line in sources)).splitlines()
            report = folder / f"prepared{number}" / "report.json"
            corpus = json.loads(report.read_text(encoding="utf-8"))["corpora"]["train"]
            figures[name] = {key: scores[key] for key in ("bleu", *(f"bleu.{each}" for each in MODIFIERS))}
            figures[name] |= {"pairs": corpus["rows"], "read": corpus["read_rows"]}
            print(name, figures[name], flush=True)
    header = ["text", "pairs read", "trained on", "BLEU", "p", *(f"BLEU, {each}" for each in MODIFIERS)]
    p_values = significance(translations, references)
    rows = [
        [name, f"{each['read']:,}", f"{each['pairs']:,}", f"{each['bleu']:.2f}", p_values[name]]
        + [f"{each[f'bleu.{modifier}']:.2f}" for modifier in MODIFIERS]
        for name, each in figures.items()
    ]
    print(f"\n{common.markdown_table(header, rows)}")
    common.finish(arguments, found, figures)


def significance(translations: dict[str, list[str]], references: list[str]) -> dict[str, str]:
    """The p-value of each run against the first."""
    _, scores = PairedTest(list(translations.items()), {"BLEU": BLEU()}, [references], "bs", n_samples=1000)()
    values = [result.p_value for result in scores["BLEU"]]
    return {name: "" if p is None else f"{p:.3f}" for name, p in zip(translations, values, strict=True)}


if __name__ == "__main__":
    main()
