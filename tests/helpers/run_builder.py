"""Run folders as training leaves them, made by formula: for tests of what is read from one, and drawn of it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.files import write_json, write_text
from dist_transformer.run.folder import RunDir

BEGAN = 1_800_000_000.0
SECONDS_PER_STEP = 0.25
FIXED = [
    ("The house is blue.", "Das Haus ist blau."),
    ("Where is <b>my</b> & your key?", "Wo ist mein & dein Schlüssel?"),
]


def write_run(
    folder: Path, num_steps: int = 400, every: int = 5, restarts: tuple[int, ...] = (150,), **overrides: Any
) -> RunDir:
    """A finished run of `num_steps` with a record every `every` steps, restarted at the given steps."""
    run_dir = RunDir(folder)
    validate_every = max(every, num_steps // 8)
    text = folder.parent / f"{folder.name}.yaml"
    folder.mkdir(parents=True)
    corpora = "train: {demo: train}, validation: {demo: validation}, more_validation: {newstest: {demo: test}}"
    write_text(text, f"data: {{{corpora}}}\n")
    settings = {
        "model.preset": "tiny", "schedule.warmup_steps": 5, "training.max_steps": num_steps,
        "validation.every_steps": validate_every, "validation.metric": "bleu",
        "data.prepared": str(folder.parent / "prepared"), **overrides,
    }  # fmt: skip
    config = load_config(text, [f"{key}={value}" for key, value in settings.items()], check_files=False)
    write_text(run_dir.config, to_yaml(config))
    steps = range(every, num_steps + 1, every)
    validated = [step for step in steps if step % validate_every == 0]
    append(run_dir.metrics, [train_record(step) for step in steps])
    append(run_dir.metrics, [validation_record(step, num_steps) for step in validated])
    append(run_dir.samples, [samples_record(step) for step in validated])
    write_history(run_dir, num_steps, restarts)
    for step in validated[-3:]:
        write_checkpoint(run_dir, step, validation_record(step, num_steps))
    write_json(run_dir.state, {"run_id": "a1", "state": "finished", "step": num_steps, "starts": 1 + len(restarts),
                               "num_ranks": 2, "host": "n1", "slurm_job_id": "12", "version": "0.1.0"})  # fmt: skip
    write_json(run_dir.evaluation / "test.json", {"bleu": 31.25, "chrf": 55.5, "exact_match": 0.125, "pairs": 1000,
                                                  "bleu_signature": "nrefs:1|tok:13a", "chrf_signature": "nc:6",
                                                  "beam_size": 4})  # fmt: skip
    return run_dir


def append(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def train_record(step: int) -> dict[str, Any]:
    noise = float(np.random.default_rng(step).normal())
    loss = 2.6 + 7.5 / (1 + step / 25) + 0.05 * noise
    return {
        "event": "train", "step": step, "time": time_of(step), "epoch": step // 100, "loss": loss, "nll": loss - 0.4,
        "learning_rate": 0.01 * min(step / 100, (100 / step) ** 0.5), "gradient_norm": 3 * math.exp(0.5 * noise),
        "loss_scale": 2.0 ** (10 + min(6, step // 120)), "skipped_updates": step // 170, "total_target_tokens": 900 * step,
        "target_tokens": 4500, "tokens_per_second": 3600 + 90 * noise, "padding_share": 0.06 + 0.004 * noise,
        "straggler_ratio": 1.02, "data_wait_share": 0.004, "save_seconds": 0.0, "mfu": 0.3 + 0.01 * noise,
        "batch_digest": "0123456789abcdef",
    }  # fmt: skip


def validation_record(step: int, num_steps: int) -> dict[str, Any]:
    """Best before its end by BLEU, and by the loss at its end."""
    rise = step / num_steps
    measures: dict[str, Any] = {}
    for prefix, less in (("", 0.0), ("newstest/", 6.0)):
        loss = 2.7 + 3 * math.exp(-4 * rise) + less / 10
        measures |= {
            f"{prefix}loss": loss, f"{prefix}nll": loss - 0.5, f"{prefix}perplexity": math.exp(loss - 0.5),
            f"{prefix}token_accuracy": 0.7 * rise, f"{prefix}bleu": 40 * rise * (1.6 - rise) - less,
            f"{prefix}chrf": 60 * rise**0.3 - less, f"{prefix}bleu_signature": "nrefs:1|tok:13a",
            f"{prefix}chrf_signature": "nc:6",
        }  # fmt: skip
    return {"event": "validation", "step": step, "time": time_of(step), **measures}


def samples_record(step: int) -> dict[str, Any]:
    sentences = [
        {"number": number, "fixed": True, "source": source, "reference": reference,
         "translation": reference if step > 200 else f"Das {number}."}
        for number, (source, reference) in enumerate(FIXED, start=1)
    ]  # fmt: skip
    drawn = {"number": 30 + step, "fixed": False, "source": f"Number {step}", "reference": f"Nummer {step}",
             "translation": f"Zahl {step}"}  # fmt: skip
    return {
        "event": "samples",
        "step": step,
        "time": time_of(step),
        "corpus": "validation",
        "sentences": [*sentences, drawn],
    }


def write_history(run_dir: RunDir, num_steps: int, restarts: tuple[int, ...]) -> None:
    begins, ends = (0, *restarts), (*restarts, num_steps)
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        start = {"event": "start", "step": begin, "time": time_of(begin), "num_ranks": 2, "nodes": ["n1", "n2"],
                 "slurm_job_id": "12", "restart": number, "device": "cpu", "version": "0.1.0"}  # fmt: skip
        is_last = end == num_steps
        state, reason = ("finished", "training.max_steps") if is_last else ("stopped", "signal USR1")
        append(
            run_dir.history,
            [start, {"event": "end", "step": end, "time": time_of(end), "state": state, "reason": reason}],
        )


def write_checkpoint(run_dir: RunDir, step: int, measures: dict[str, Any]) -> None:
    plain = {key: value for key, value in measures.items() if key not in ("event", "step", "time")}
    write_json(
        run_dir.checkpoints / f"step_{step:08d}" / "state.json", {"step": step, "num_ranks": 2, "validation": plain}
    )


def write_prepared(folder: Path) -> None:
    """A prepared corpus as far as a report reads it; its picture is one black point."""
    lengths = {"mean": 24.9, "50": 25, "90": 35, "95": 38, "99": 44, "100": 56}
    counts = {"training": True, "read_rows": 1000, "rows": 990, "dropped": {"empty": 3, "too_long": 7, "identical": 0},
              "source_tokens": 24651, "target_tokens": 26000, "estimated_from_rows": None,
              "source_lengths": lengths, "target_lengths": lengths}  # fmt: skip
    write_json(folder / "report.json", {
        "corpora": {"train": counts, "validation": {**counts, "training": False}}, "repeated_pairs": 11,
        "compared_pairs": 990, "not_compared": [], "overlap": {"validation": {"of_pairs": 990, "pairs": 1, "sources": 2}},
    })  # fmt: skip
    write_json(folder / "manifest.json", {"digest": "feed" * 16, "source_vocabulary": 304, "target_vocabulary": 304})
    (folder / "lengths.png").write_bytes(ONE_POINT_PNG)


ONE_POINT_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000 3a7e9b55 0000000a 4944415478 9c636000000002000148afa471 "
    "0000000049454e44ae426082".replace(" ", "")
)


def time_of(step: int) -> float:
    return BEGAN + SECONDS_PER_STEP * step
