"""Cost of 40.6 tokenised BLEU on Multi30k, English to German: CPU seconds and time from text to the models of some seeds.

    python benchmarks/speedrun.py benchmarks/speedrun/muon.yaml --data FOLDER --work /tmp/speedrun --json muon.json

The entries are in benchmarks/speedrun/, their figures in benchmarks/speedrun.md. FOLDER has train, val and test_2016_flickr,
each in .en and .de, or .gz of them: the raw text of task 1 in the repository multi30k/dataset. It is lower-cased, then
normalised and tokenised as Moses does. Each run has one core for all of `train` (prepare, training, the average of
checkpoints), and as many run at the same time as there are --cores; the model is scored afterwards, which does not count.
"""

import argparse
import gzip
import json
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
from marian_scores import run as run_command
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records

TEXTS = ("train", "val", "test_2016_flickr")
GOAL = 40.6
REFERENCE_WORDS = 12_103
"""Words of the test set's German in the log of Wu et al. (2021)."""


def write_text(data: Path, folder: Path) -> None:
    """Writes the text of each set as the published setting has it."""
    for language in ("en", "de"):
        normalizer, tokenizer = MosesPunctNormalizer(language), MosesTokenizer(language)
        for name in TEXTS:
            lines = (normalizer.normalize(line.lower()) for line in lines_of(data / f"{name}.{language}"))
            text = "".join(f"{tokenizer.tokenize(line, return_str=True)}\n" for line in lines)
            (folder / f"{name}.lc.norm.tok.{language}").write_text(text, encoding="utf-8")
    if (words := len(text.split())) != REFERENCE_WORDS:
        print(f"NOT the published setting: {words:,} German words in the test set in place of {REFERENCE_WORDS:,}")


def lines_of(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") if path.is_file() else gzip.open(f"{path}.gz", "rt", encoding="utf-8") as file:
        yield from (line.rstrip("\n") for line in file)


def trained(entry: Path, work: Path, seed: int, core: int) -> dict[str, Any]:
    """Trains and scores the model of a seed on a core; returns scores, cost and curve. SystemExit: it failed."""
    name = f"{entry.stem}-{seed}"
    run, log, said = work / name, work / f"{name}.log", work / f"{name}.json"
    settings = {
        "run.name": name, "run.seed": seed, "run.root": work, "data.root": work, "data.prepared": work / f"{name}-prepared",
        "tracking.enabled": "false",
    }  # fmt: skip
    command = ["taskset", "-c", core, sys.executable, "-m", "dist_transformer", "train", entry]
    command += [f"{key}={value}" for key, value in settings.items()]
    if run.exists():
        raise SystemExit(f"{run} is there already: it would only be resumed; remove it, or name another --work")
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([str(word) for word in command], env=environment, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"{name} failed; see {log}")
    run_command([*command[:6], "evaluate", run, "--tokenised", "spaces", "--output", said])
    curve = [record for record in read_records(RunDir(run).metrics) if record["event"] == "validation"]
    return {
        "seed": seed,
        "bleu": json.loads(said.read_text(encoding="utf-8"))["bleu_tokenised"],
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "seconds": seconds,
        "validation_nll": {record["step"]: round(record["nll"], 4) for record in curve},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entries", nargs="+", type=Path, metavar="ENTRY", help="YAML files")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the text and the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1])
    arguments = common.arguments_of(parser, rounds=1)
    found, work = common.begin(1), arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    write_text(arguments.data, work)
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in arguments.cores:
        free.put(core)

    def on_a_free_core(entry: Path, seed: int) -> dict[str, Any]:
        core = free.get()
        try:
            return trained(entry.absolute(), work, seed, core)
        finally:
            free.put(core)

    figures, rows, began = {}, [], time.perf_counter()
    with ThreadPoolExecutor(len(arguments.cores)) as pool:
        waiting = [
            [pool.submit(on_a_free_core, entry, seed) for seed in arguments.seeds] for entry in arguments.entries
        ]
        try:
            for entry, runs in zip(arguments.entries, waiting, strict=True):
                figures[entry.stem] = results = [run.result() for run in runs]
                bleu = [result["bleu"] for result in results]
                cost = [statistics.mean(result[key] for result in results) for key in ("cpu_seconds", "seconds")]
                mean = f"{statistics.mean(bleu):.2f}{'' if statistics.mean(bleu) >= GOAL else f', below {GOAL}'}"
                rows.append(
                    [entry.stem, ", ".join(f"{score:.2f}" for score in bleu), mean, *(f"{each:,.0f}" for each in cost)]
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    seeds = ", ".join(map(str, arguments.seeds))
    print(
        common.markdown_table(["entry", f"BLEU of seeds {seeds}", "mean", "CPU seconds a seed", "seconds a seed"], rows)
    )
    print(f"\n{time.perf_counter() - began:,.0f} s in all on {len(arguments.cores)} cores, with the scoring")
    common.finish(arguments, found, figures)


if __name__ == "__main__":
    main()
