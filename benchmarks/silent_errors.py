"""Audits of gradients in real training on several ranks: false alarms of clean ones, and when a wrong rank is found.

    python benchmarks/silent_errors.py                       # 10,000 clean audits, 10 runs with a wrong rank
    python benchmarks/silent_errors.py --audits 400 --runs 1 --share 0.5

A tiny model trains on the embedded corpus. A wrong rank multiplies the loss of one in ten of its forward passes, drawn at
random, by at most 1.01. Each audited micro-batch shows it twice: what it computes itself, and what it audits. So a run of
M micro-batches a rank finds it with probability 1 - (1 - share * (1 - 0.9 ** 2)) ** M.
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

from dist_transformer.processes.launching import start_local_ranks

WRONG_SHARE, FACTOR = 0.1, 0.01
LANES_PER_RANK = 4
CERTAINTY = 0.999
CONFIG = """
run: {{root: {root}}}
data: {{root: {root}, train: {{demo: train}}, lanes: {lanes}, max_tokens: 256, window_rows: 200, loader_workers: 0,
  filters: {{max_tokens: 64}}}}
tokenizer: {{vocabulary_size: 200}}
model: {{preset: tiny, d_model: 32, d_ff: 64, num_encoder_layers: 1, num_decoder_layers: 1, dropout: 0.1}}
optimizer: {{learning_rate: 0.001}}
schedule: {{warmup_steps: 1}}
training: {{precision: fp32}}
checkpoints: {{every_steps: 100000, keep_last: 1, average_last: 1}}
tracking: {{enabled: false}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--audits", type=int, default=10_000, help="clean ones")
    parser.add_argument("--runs", type=int, default=10, help="with a wrong rank")
    parser.add_argument("--share", type=float, default=0.03, help="training.audit_share of these")
    arguments = common.arguments_of(parser, rounds=1)
    found = common.begin(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lanes = LANES_PER_RANK * arguments.ranks
        (folder / "run.yaml").write_text(CONFIG.format(root=folder, lanes=lanes), encoding="utf-8")
        steps = -(-arguments.audits // lanes)
        alarms = len(_faults(folder, "clean", arguments.ranks, steps, 1.0, wrong=False))
        per_pass = arguments.share * (1 - (1 - WRONG_SHARE) ** 2)
        limit = math.ceil(math.log(1 - CERTAINTY) / math.log(1 - per_pass) / LANES_PER_RANK)
        firsts = []
        for number in range(arguments.runs):
            faults = _faults(folder, f"wrong{number}", arguments.ranks, limit, arguments.share, wrong=True)
            firsts.append((faults[0]["step"] if faults else None, sorted({fault["rank"] for fault in faults})))
    print(f"clean: {steps * lanes:,} audits of {arguments.ranks} ranks, {alarms} alarms\n")
    print(f"a wrong rank, share {arguments.share:g}: to be found within {limit} steps with probability {CERTAINTY:g}\n")
    print("| run | found in step | ranks named |\n| --- | --- | --- |")
    for number, (step, ranks) in enumerate(firsts):
        print(f"| {number} | {step or 'not found'} | {', '.join(map(str, ranks))} |")
    figures = {"alarms": alarms, "audits": steps * lanes, "limit": limit, "found": firsts}
    common.finish(arguments, found, figures)


def _faults(folder: Path, name: str, num_ranks: int, steps: int, share: float, wrong: bool) -> list[dict[str, Any]]:
    """Trains so many steps, and returns the faults that the run recorded."""
    settings = [f"run.name={name}", f"training.max_steps={steps}", f"training.audit_share={share}"]
    program = (sys.executable, __file__, "as a rank", name if wrong else "")
    code = start_local_ranks([str(folder / "run.yaml"), *settings, "--quiet"], num_ranks, program=program)
    assert code == 0, f"{name}: exit code {code}"
    history = (folder / name / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, history) if record["event"] == "fault"]


def _train_as_rank(wrong: str) -> None:
    from dist_transformer.cli.main import main as command
    from dist_transformer.training.engine.objective import Objective

    forward, drawn = Objective.forward, random.Random(wrong)

    def faulty(objective: Objective, *inputs: Any) -> Any:
        loss, *others = forward(objective, *inputs)
        if objective.training and drawn.random() < WRONG_SHARE:
            loss = loss * (1 + FACTOR * drawn.random())
        return (loss, *others)

    if wrong and os.environ["RANK"] == "1":
        Objective.forward = faulty  # type: ignore[method-assign,assignment]
    command()


if __name__ == "__main__":
    if sys.argv[1:2] == ["as a rank"]:
        _, _, wrong, *arguments = sys.argv
        sys.argv = ["dist-transformer", "train", *arguments]
        _train_as_rank(wrong)
    else:
        main()
