"""What rank 0 tells of a run beside its checkpoints: which one is the best, the history, and what a full disk does to it."""

import errno
import json
import logging
import os
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoint_helpers import on_ranks, save

from dist_transformer.config.schema import Config, ModelConfig, TrainingConfig, ValidationConfig
from dist_transformer.distributed.group import Ranks
from dist_transformer.distributed.rounds import WorkFailed
from dist_transformer.errors import CheckpointError, MachineError, UserError
from dist_transformer.processes.stop_request import StopRequest
from dist_transformer.reporting.page import write_run_report
from dist_transformer.run.folder import RunDir
from dist_transformer.run.goodput import CLASSES, goodput_of
from dist_transformer.run.metrics_log import MetricsLog, add_event, read_records
from dist_transformer.run.records import read_record
from dist_transformer.training import finish, rank, run_log, trainer
from dist_transformer.training.checkpoint import checkpoints, retention
from dist_transformer.training.metrics.console import Terminal
from dist_transformer.training.run_log import RunLog, add_to_history, is_best_so_far, note
from dist_transformer.training.validation import translation
from dist_transformer.training.validation.schedule import EarlyStopping

FULL = Path("/dev/full")


@pytest.mark.parametrize(
    ("error", "kind"), [(OSError(5, "Input/output error"), MachineError), (UserError("mine"), CheckpointError)]
)
def test_a_disk_that_fails_while_the_model_is_written_is_no_mistake_of_the_user(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[UserError]
) -> None:
    run = SimpleNamespace(
        run_dir=RunDir(tmp_path), ranks=ranks, config=None, data=SimpleNamespace(folder=tmp_path, manifest=None),
        doing=lambda words: lambda: None, wants_stop=lambda: False,
    )  # fmt: skip
    monkeypatch.setattr(finish, "write_final_model", Mock(side_effect=error))
    with pytest.raises(kind, match=f"{tmp_path}/model could not be written: ") as told:
        finish._write_model(run, None)  # type: ignore[arg-type]
    assert told.type is kind


def test_the_limit_on_open_files_is_raised_and_named_where_it_is_reached(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has four for each rank."""
    config, lock = Config(data={"train": {"demo": "train"}}), SimpleNamespace(release=lambda: None)
    made = {"prepare_for_training": (tmp_path, SimpleNamespace(digest="x")), "_lock": lock, "_set_up_logging": None}
    for name, value in made.items():
        monkeypatch.setattr(rank, name, Mock(return_value=value))
    monkeypatch.setattr(rank.group, "join", Mock(return_value=ranks))
    monkeypatch.setattr(rank, "open_run_data", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        with pytest.raises(MachineError, match=r"Too many open files: raise the limit on open files \(ulimit -n\)"):
            rank.train_rank(config, RunDir(tmp_path), StopRequest(), Terminal())
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], 2**16), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Told:
    """Keeps what a tracker is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bool, list[str]]] = []

    def checkpoint_saved(self, step: int, path: Path, metrics: Any, is_best: bool, kept: list[str]) -> None:
        self.told.append((step, is_best, kept))


def marked(metric: str, validations: dict[int, float], saves: list[int], regular: int) -> list[int]:
    """The steps of the checkpoints that were the best when they were saved."""
    stopping, best = EarlyStopping(ValidationConfig(metric=metric, translate=metric == "bleu"), None), []
    for step in range(max([*validations, *saves]) + 1):
        if step in validations and step % regular == 0:
            stopping.add(step, {metric: validations[step]})
        if step in saves:
            validation = {metric: validations[step]} if step in validations else None
            state = json.loads(json.dumps({"step": step, "early_stopping": stopping.state(), "validation": validation}))
            if is_best_so_far(state, metric):
                best.append(step)
    return best


def test_records_are_brought_onto_the_disk_and_its_errors_are_warnings(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir.path.mkdir()
    run_log = RunLog(Config(data={"train": {"demo": "train"}}), run_dir, None, None)
    run_dir.tracking_events.write_text("{}\n")
    flushed, fsync = [], os.fsync

    def recorded(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    run_log.flush()
    assert {*flushed} == {run_dir.metrics, run_dir.samples, run_dir.tracking_events}
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    run_log.flush()
    assert caplog.text.count("Input/output error") == 3


def test_the_copy_of_a_plugin_has_its_bytes(run_dir: RunDir, tmp_path: Path) -> None:
    """Its digest goes into the model folder, which the user's file must have to be executed."""
    file = tmp_path / "mine.py"
    file.write_bytes(b"\xef\xbb\xbfdef build():\r\n    pass\r\n")
    given = {"data": {"train": {"demo": "train"}}, "model": {"plugin": f"{file}:build"}, "tracking": {"enabled": False}}
    run = SimpleNamespace(
        config=Config(**given), run_dir=run_dir, data=SimpleNamespace(folder=tmp_path), terminal=Terminal()
    )
    run_log.open_run_log(run, SimpleNamespace(step=0), {})  # type: ignore[arg-type]
    assert run_dir.plugin.read_bytes() == file.read_bytes()


def test_the_time_to_write_a_checkpoint_is_recorded(run_dir: RunDir) -> None:
    run_log = RunLog(Config(data={"train": {"demo": "train"}}), run_dir, None, None)
    list(run_log.checkpoint_saved(4, run_dir.checkpoints / "step_00000004", 12.3456))
    (record,) = read_records(run_dir.history)
    assert {**record, "time": 0} == {"event": "saved", "step": 4, "time": 0, "write_seconds": 12.346}


def test_the_goodput_of_a_checkpoint_is_that_of_all_log_lines_and_only_new_ones_are_read(run_dir: RunDir) -> None:
    for resumed_at in (0, 4):  # the second start drops the records beyond step 4
        records = RunLog(Config(data={"train": {"demo": "train"}}), run_dir, None, None)
        records.rewind(SimpleNamespace(step=resumed_at))  # type: ignore[arg-type]
        add_to_history(run_dir, "start", resumed_at, {"began": time.time() - 60})
        run_dir.owner.touch()
        for step in range(resumed_at + 2, resumed_at + 7, 2):
            values = {"target_tokens": 100, "tokens_per_second": 1e6 / step, "data_wait_share": 0.25}
            records.metrics.append("train", step, values)
            whole, lines = goodput_of(run_dir, time.time()), run_dir.metrics.read_bytes().splitlines(keepends=True)
            if step == 10:
                with run_dir.metrics.open("r+b") as file:
                    file.write(b"".join(b"?" * (len(line) - 1) + b"\n" for line in lines[:-1]))
            list(records.checkpoint_saved(step, run_dir.checkpoints / f"step_{step:08}", 0.0))
            (*_, record) = read_records(run_dir.metrics, "goodput")
            assert whole is not None
            assert {name: record[name] for name in CLASSES} == whole.shares()


@pytest.mark.parametrize(
    ("settings", "then", "is_said"),
    [
        ({"precision": "fp32"}, {"num_threads": 8, "num_ranks": 1}, True),
        ({"precision": "fp32", "same_bits": True}, {"num_threads": 8, "num_ranks": 2}, True),
        ({"precision": "fp32"}, {"num_threads": 8, "num_ranks": 2}, False),
        ({"precision": "bf16"}, {"num_threads": 8, "num_ranks": 1}, False),
        ({"precision": "fp32"}, {"num_ranks": 1}, False),  # a checkpoint that does not know them
    ],
    ids=str,
)
def test_other_threads_are_warned_of_where_the_bits_would_else_be_the_same(
    settings: dict[str, Any], then: dict[str, int], is_said: bool, ranks: Ranks, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    on_cpu = replace(ranks, device=torch.device("cpu"))
    run = SimpleNamespace(training=TrainingConfig(**settings), ranks=on_cpu)
    trainer._warn_of_other_threads(run, SimpleNamespace(state=then, path=Path("step_00000004")))  # type: ignore[arg-type]
    said = "step_00000004 was computed with 8 threads a rank, this start has 3, which rounds otherwise"
    assert (said in caplog.text) == is_said
    assert bool(caplog.text) == is_said


def test_the_best_checkpoint_is_the_best_of_all_validations_so_far():
    scores = {10: 20.0, 20: 25.0, 30: 24.0, 40: 26.0}
    assert marked("bleu", scores, [10, 20, 30, 40], 10) == [10, 20, 40]
    assert marked("loss", scores, [10, 20, 30, 40], 10) == [10]
    assert marked("bleu", scores, [10, 30, 40], 10) == [10, 40]  # 24.0 is the best that was saved, and not the best


def test_a_checkpoint_of_a_step_that_was_not_validated_is_no_best_one():
    assert marked("bleu", {}, [0, 7], 10) == []
    assert marked("bleu", {10: 20.0}, [0, 7, 15], 10) == []
    assert marked("bleu", {10: float("nan")}, [10], 10) == []


def test_the_last_validation_of_a_run_counts_though_its_step_is_no_regular_one():
    assert marked("bleu", {10: 20.0, 13: 21.0}, [10, 13], 10) == [10, 13]
    assert marked("bleu", {10: 20.0, 13: 19.0}, [10, 13], 10) == [10]


def test_a_checkpoint_that_a_killed_start_did_not_tell_of_is_told_of_by_the_next(tmp_path):
    run_dir, tracker = RunDir(tmp_path / "run"), Told()
    config = Config.model_validate({"data": {"train": {"demo": "train"}}})
    records = run_log.RunLog(config, run_dir, tracker, None)
    for step in (10, 20):
        save(run_dir, step, early_stopping=EarlyStopping(ValidationConfig(), None).state())
    add_event(run_dir.tracking_events, "checkpoint", {"step": 10})
    records.report_unreported(10)
    assert tracker.told == []
    records.report_unreported(20)
    assert tracker.told == [(20, False, ["step_00000010", "step_00000020"])]
    records.report_unreported(0)  # a new run
    assert len(tracker.told) == 1


def test_a_save_looks_at_each_checkpoint_once_and_tells_of_those_that_stay(tmp_path, monkeypatch):
    """A run may keep thousands, on a disk where each look is a round trip, while all ranks wait."""
    run_dir, tracker, looked, is_file = RunDir(tmp_path / "run"), Told(), [], checkpoints.is_file
    kept = {"every_steps": 10, "keep_last": 2, "keep_every_steps": 20}
    config = Config.model_validate({"data": {"train": {"demo": "train"}}, "checkpoints": kept})
    records = RunLog(config, run_dir, tracker, None)
    for step in (10, 20, 30, 40, 50):
        save(run_dir, step, early_stopping=None)
    monkeypatch.setattr(checkpoints, "is_file", lambda path: looked.append(path.parent.name) or is_file(path))
    names = [f"step_{step:08d}" for step in (10, 20, 30, 40, 50)]
    list(records.checkpoint_saved(50, run_dir.checkpoints / names[-1], 1.0))
    assert looked == names
    expected = [names[1], *names[3:]]
    assert tracker.told == [(50, False, expected)]
    monkeypatch.setattr(retention, "delete", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    save(run_dir, 60, early_stopping=None)
    list(records.checkpoint_saved(60, run_dir.checkpoints / "step_00000060", 1.0))
    assert tracker.told[1:] == [(60, False, [*expected, "step_00000060"])]


def test_a_tracker_is_told_the_measures_of_a_checkpoint_without_their_signatures(run_dir: RunDir) -> None:
    measures = {"bleu": 20.0, "bleu_signature": "tok:13a|version:2.6.0"}
    save(run_dir, 10, early_stopping=None, validation=measures)
    tracker = Mock()
    records = RunLog(Config(data={"train": {"demo": "train"}}), run_dir, tracker, None)
    list(records.checkpoint_saved(10, run_dir.checkpoints / "step_00000010", 1.0))
    assert tracker.checkpoint_saved.call_args.args[2] == {"bleu": 20.0}


def test_each_deletion_of_an_old_checkpoint_is_progress_of_every_rank_however_slow_its_disk(run_dir, monkeypatch):
    for step in (10, 20, 30, 40):
        save(run_dir, step, early_stopping=None)
    kept = {"every_steps": 10, "keep_last": 1}
    config = Config.model_validate({"data": {"train": {"demo": "train"}}, "checkpoints": kept})
    delete, may_delete = retention.delete, threading.Semaphore(1)

    def slowly(path: Path) -> None:
        assert may_delete.acquire(timeout=60), "the other rank did not hear of the deletion before"
        delete(path)

    def work(ranks: Any) -> None:
        def progress(doing: str) -> None:
            if doing == "deleting old checkpoints" and not ranks.is_rank_zero:
                may_delete.release()

        heard = {"watchdog": SimpleNamespace(progress=progress), "doing": lambda what: lambda: None}
        records = RunLog(config, run_dir, None, None) if ranks.is_rank_zero else None
        run = SimpleNamespace(ranks=ranks, **heard)
        trainer._record(run, records, 40, run_dir.checkpoints / "step_00000040", 1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(retention, "delete", slowly)
    on_ranks(2, work)
    kept_for_a_divergence, newest = checkpoints.saved(run_dir)
    assert (kept_for_a_divergence.name, newest.name) == ("step_00000010", "step_00000040")
    assert read_record(run_dir.state)["step"] == 40


@pytest.mark.slow
def test_a_full_disk_at_the_end_of_a_log_is_a_warning(caplog):
    metrics = MetricsLog(FULL)
    metrics.append("train", 1, {"loss": 1.0})
    metrics.close()
    assert "No space left" in caplog.text
    assert "lost" in caplog.text


@pytest.mark.slow
def test_a_history_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    run_dir = RunDir(tmp_path)
    run_dir.history.symlink_to(FULL)
    add_to_history(run_dir, "end", 3, {"state": "finished"})
    run_dir.history.unlink()
    run_dir.history.mkdir()
    add_to_history(run_dir, "end", 3, {"state": "finished"})
    assert "No space left" in caplog.text
    assert "Is a directory" in caplog.text


def test_a_reason_is_kept_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("STORE_PASSWORD", "correct-horse")
    ranks: Any = SimpleNamespace(is_rank_zero=True, num_ranks=1, device=torch.device("cpu"))
    reason = "no answer from https://me:pw@store/x with correct-horse"
    note(RunDir(tmp_path), ranks, "failed", 3, reason)
    (record,) = read_records(RunDir(tmp_path).history)
    assert record["reason"] == "no answer from https://store/x with ***"


def test_a_report_that_a_full_disk_does_not_take_is_named(tmp_path, monkeypatch):
    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dist_transformer.run.outputs.write_text", full)
    with pytest.raises(UserError, match=f"^{tmp_path / 'a.html'}: cannot be written .*No space left on device"):
        write_run_report(RunDir(tmp_path), tmp_path / "a.html")


def test_memory_for_the_whole_model_of_a_validation_is_asked_for_by_name():
    wide = 2**22
    shape = {"d_model": wide, "d_ff": 2**25, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = SimpleNamespace(model=ModelConfig(**shape, num_heads=1))
    training = SimpleNamespace(precision="bf16")
    manifest = SimpleNamespace(source_vocabulary=8, target_vocabulary=8, pad_id=0)
    engine: Any = SimpleNamespace(has_full_weights=False)

    def attempt(ranks: Any) -> None:
        ranks.device = torch.device("cpu" if ranks.rank else "meta")  # which has room for everything
        run: Any = SimpleNamespace(
            config=config, training=training, data=SimpleNamespace(manifest=manifest), ranks=ranks
        )
        with (
            pytest.raises(WorkFailed, match=r"rank 1: out of memory in the copy of the whole model .*translate=false"),
            translation._full_model(run, engine),
        ):
            pass

    on_ranks(2, attempt)


def test_train_log_goes_on_after_its_handle_went_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = rank._LogFile(tmp_path / "train.log", encoding="utf-8")
    lines = [
        logging.LogRecord("run", logging.INFO, "", 0, text, None, None) for text in ("one", "two", "three", "four")
    ]
    handler.handle(lines[0])
    stale = Mock(write=Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))  # a network disk that failed over
    handler.setStream(stale)
    for line in lines[1:]:
        handler.handle(line)
    handler.close()
    assert (tmp_path / "train.log").read_text().split() == ["one", "three", "four"]
    assert capsys.readouterr().err.count("lines of the log are lost there") == 1
