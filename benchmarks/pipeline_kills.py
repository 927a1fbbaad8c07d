"""A pipeline whose processes are killed at random: does it end with the files of one that nothing disturbed?

    python benchmarks/pipeline_kills.py        # about ten minutes on two cores

configs/pipeline/tiny.yaml with longer training and two ranks runs once undisturbed, then again with kills at random,
exponential times after each start or kill, until there were as many as asked for; it is started again after each of them, as
a person or Slurm does. Killed is what the table of kinds says. At the end the file of weights of every model, the
translations, scores, kept pairs and int8 models must be the same, byte by byte (what `evaluate` writes holds its own speed,
so that its scores are compared).
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import common
import psutil

from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.errors import EXIT_USER_ERROR

KINDS = ("the pipeline alone", "the verb", "a process of the verb", "all at once", "told to stop")
TINY = Path(__file__).resolve().parents[1] / "configs" / "pipeline" / "tiny.yaml"
HELD = ("is run by one process at a time", "a process works in it", "this run folder")
"""Parts of the messages of a pipeline whose node is still worked on."""
TRAINED = ("backward", "teacher", "student", "student_alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--mean-seconds", type=float, default=10.0, help="from a start to a kill, in the mean")
    parser.add_argument("--steps", type=int, default=1500, help="of each training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="writes the figures to this file, too")
    arguments = parser.parse_args()
    found = common.begin(1)
    generator = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_text(folder / "text")
        said = folder / "said"
        seconds = _run_to_its_end(_command(folder, "undisturbed", arguments.steps), said)
        print(f"undisturbed: {seconds:.0f} s", flush=True)
        began = time.monotonic()
        kills = _run_with_kills(_command(folder, "killed", arguments.steps), said, generator, arguments)
        killed_seconds = time.monotonic() - began
        undisturbed, killed = _results(folder / "undisturbed"), _results(folder / "killed")
        different = sorted(place for place in undisturbed | killed if undisturbed.get(place) != killed.get(place))
        starts = {node: json.loads((folder / "killed" / node / "run.json").read_text())["starts"] for node in TRAINED}
    counts = Counter(kind for kind, _ in kills)
    print(f"killed: {killed_seconds:.0f} s, {len(kills)} kills; starts of the trainings {starts}\n")
    print("| what was killed | times |\n|---|---|")
    print("\n".join(f"| {kind} | {counts[kind]} |" for kind in KINDS))
    print(f"\n{len(undisturbed)} files compared, different: {different or 'none'}")
    if arguments.json:
        figures = {"seconds": seconds, "killed_seconds": killed_seconds, "kills": kills, "different": different}
        arguments.json.write_text(json.dumps({**found, **figures, "files": len(undisturbed)}, indent=1) + "\n")
    sys.exit(1 if different or len(kills) < arguments.kills else 0)


def _write_text(folder: Path) -> None:
    folder.mkdir()
    for split, count in (("train", 2000), ("validation", 100), ("test", 100)):
        pairs = [pair for _, pair in zip(range(count), demo_pairs(split), strict=False)]
        for side, language in enumerate(("en", "de")):
            (folder / f"{split}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    lines = (folder / "train.de").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "mono.de").write_text("".join(lines[:1000]), encoding="utf-8")


def _command(folder: Path, name: str, steps: int) -> list[str]:
    of_trainings = [f"nodes.{node}.{key}" for node in TRAINED for key in (f"set.training.max_steps={steps}", "ranks=2")]
    places = [f"root={folder / name}", f"data_root={folder / 'text'}", "nodes.back_translation.ranks=2"]
    settings = ["set.checkpoints.every_steps=10", "nodes.forward.ranks=2"]
    program = [sys.executable, "-m", "dist_transformer", "pipeline", "run", str(TINY)]
    return [*program, *places, *settings, *of_trainings]


def _start(command: list[str], said: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with said.open("wb") as file:  # no pipe: a verb that outlives its pipeline would hold it open
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=file)


def _run_to_its_end(command: list[str], said: Path) -> float:
    began, process = time.monotonic(), _start(command, said)
    if process.wait():
        sys.exit(f"the pipeline ended with exit code {process.returncode}:\n{said.read_text()[-3000:]}")
    return time.monotonic() - began


def _run_with_kills(
    command: list[str], said: Path, generator: random.Random, arguments: argparse.Namespace
) -> list[tuple[str, float]]:
    """Returns the kinds of the kills, and the seconds from the start to each."""
    kills: list[tuple[str, float]] = []
    while True:
        process = _start(command, said)
        while process.poll() is None:
            life = 2.0 + generator.expovariate(1 / arguments.mean_seconds) if len(kills) < arguments.kills else None
            try:
                process.wait(life)
            except subprocess.TimeoutExpired:
                kind = KINDS[len(kills) % len(KINDS)]
                if _strike(process, kind, generator):
                    kills.append((kind, round(life or 0.0, 1)))
                    print(f"kill {len(kills)}: {kind} after {life:.1f} s", flush=True)
        if process.returncode == 0:
            return kills
        if process.returncode == EXIT_USER_ERROR:
            if not any(held in said.read_text() for held in HELD):
                sys.exit(f"the pipeline ended with exit code {process.returncode}:\n{said.read_text()[-3000:]}")
            time.sleep(2.0)  # a verb that outlived its pipeline still works: a person waits for it


def _strike(process: "subprocess.Popen[bytes]", kind: str, generator: random.Random) -> bool:
    """Kills; False if there is nothing of the kind now."""
    pipeline = psutil.Process(process.pid)
    if kind == "told to stop":
        process.terminate()
        return True
    below = pipeline.children(recursive=True)
    chosen = {
        "the pipeline alone": [pipeline],
        "the verb": pipeline.children(),
        "a process of the verb": [each for each in below if each.ppid() != process.pid],
        "all at once": [pipeline, *below],
    }[kind]
    if kind == "a process of the verb" and chosen:
        chosen = [generator.choice(chosen)]
    for each in chosen:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return False
    return bool(chosen)


def _results(root: Path) -> dict[str, str]:
    """SHA-256 of all that the nodes have made, by its place; of scores, the scores."""
    found = {}
    for node in sorted(path.parent for path in root.glob("*/node.json")):
        for place in json.loads((node / "node.json").read_text())["made"]:
            content = (node / place).read_bytes()
            if place == "scores.json":
                scores = json.loads(content)
                content = json.dumps([scores["bleu"], scores["chrf"]]).encode()
            found[f"{node.name}/{place}"] = hashlib.sha256(content).hexdigest()
    return found


if __name__ == "__main__":
    main()
