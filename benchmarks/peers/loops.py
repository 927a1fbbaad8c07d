"""What runs in this environment: ours, and two loops that a careful person would write without a toolkit."""

import json
from pathlib import Path

import yaml
from corpus import LONGEST_PIECES
from protocol import (
    BETAS,
    DROPOUT,
    EPSILON,
    LABEL_SMOOTHING,
    NEVER,
    PEAK_LEARNING_RATE,
    SEED,
    WARMUP_STEPS,
    Mark,
    Peer,
    Task,
    printed_mark,
)

HERE = Path(__file__).parent
OURS = "ours"
OUR_TOKENS = 2.02
"""Our budget counts both sides and padding: this many of its tokens for each real target token."""


def start_ours(task: Task, python: Path) -> list[str]:
    """`dist-transformer train` as a user starts it: its own loader, DeepSpeed, metrics.jsonl; no tracking server, as the
    others have none."""
    text = {side: str(task.corpus.text(side)) for side in ("source", "target")}
    config = {
        "run": {"name": "race", "root": str(task.folder), "seed": SEED},
        "data": {
            "train": text, "filters": {"max_tokens": LONGEST_PIECES + 1}, "lanes": 1,
            "max_tokens": int(task.tokens * OUR_TOKENS),
        },
        "tokenizer": {"source_model": str(task.corpus.tokenizer)},
        "model": {**task.sizes, "dropout": DROPOUT},
        "optimizer": {
            "learning_rate": PEAK_LEARNING_RATE, "beta1": BETAS[0], "beta2": BETAS[1], "epsilon": EPSILON,
        },
        "schedule": {"warmup_steps": WARMUP_STEPS},
        "training": {
            "max_steps": NEVER, "precision": "fp32", "label_smoothing": LABEL_SMOOTHING,
            "log_every_steps": task.steps_per_mark,
        },
        "validation": {"every_steps": NEVER, "translate": False},
        "checkpoints": {"every_steps": NEVER},
        "tracking": {"enabled": False},
    }  # fmt: skip
    path = task.folder / "ours.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return [str(python), "-m", "dist_transformer", "train", str(path), "--quiet", "--json"]


def our_mark(line: str, task: Task) -> Mark | None:
    """A record of metrics.jsonl, which `--json` prints."""
    if not line.startswith("{"):
        return None
    record = json.loads(line)
    if record["event"] != "train":
        return None
    return Mark(record["step"], record["target_tokens"], record["loss"])


def start_loop(script: str, task: Task, python: Path) -> list[str]:
    """A script of this folder, which reads the task as JSON."""
    path = task.folder / "task.json"
    cut = [str(task.corpus.cut("train", side)) for side in ("source", "target")]
    value = {
        "cut": cut, "pieces": task.corpus.pieces, "sizes": {**task.sizes, "dropout": DROPOUT}, "tokens": task.tokens,
        "max_steps": NEVER, "steps_per_mark": task.steps_per_mark, "threads": task.threads, "seed": SEED,
        "label_smoothing": LABEL_SMOOTHING, "betas": BETAS, "epsilon": EPSILON,
        "learning_rate": PEAK_LEARNING_RATE, "warmup_steps": WARMUP_STEPS,
    }  # fmt: skip
    path.write_text(json.dumps(value), encoding="utf-8")
    return [str(python), str(HERE / script), str(path)]


PEERS = (
    Peer(OURS, (), (), start_ours, our_mark, ""),
    Peer(
        "torch.nn.Transformer loop", (), ("torch",),
        lambda task, python: start_loop("torch_loop.py", task, python), printed_mark, "",
    ),
    Peer(
        "HF Marian loop", (), ("transformers",),
        lambda task, python: start_loop("hf_loop.py", task, python), printed_mark, "",
    ),
)  # fmt: skip
