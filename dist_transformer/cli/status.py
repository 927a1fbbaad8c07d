"""status, list: state of runs, as `key: value` lines and as a table; `--json` for scripts."""

import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dist_transformer.cli.arguments import RUNS, Root, RunOrJob
from dist_transformer.cluster.job_status import Document, is_alive, report, report_all, status_found
from dist_transformer.cluster.reasons import SAID_BY_EXIT_CODE, is_held
from dist_transformer.cluster.run_ref import find_run, is_run_folder, refuse_unreadable
from dist_transformer.config.loading import load_config
from dist_transformer.errors import UserError, say
from dist_transformer.format import duration, print_table
from dist_transformer.run.folder import RunDir
from dist_transformer.run.goodput import Goodput, goodput_text
from dist_transformer.run.lock import while_nobody_trains
from dist_transformer.run.records import read_record
from dist_transformer.tracking.final_status import has_arrived, settle, status_said

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document; times in unix seconds.")]
CORRECTION_SECONDS = 5
"""Time limit for a server that is down; `status` has printed everything by then."""

_COLUMNS = ("run", "state", "job", "step", "loss", "last record", "checkpoint")


def status_command(
    run: RunOrJob,
    root: Root = RUNS,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Until it ends or Ctrl-C; also of a folder of runs.")] = False,
) -> None:
    """Show the state of a run and its job: why it waits, how far it is, what ended it last."""
    if watch and as_json:
        raise UserError("--watch and --json exclude each other: a script asks again with --json")
    if watch:
        from dist_transformer.cli import watch as live  # imports numpy

        is_run = not Path(run).is_dir() or is_run_folder(Path(run))
        live.watch(find_run(run, root).run_dir.path if is_run else Path(run), is_run=is_run)
        return
    document = report(find_run(run, root))
    if as_json:
        print(json.dumps(document, ensure_ascii=False, indent=1))
    else:
        for name, text in status_rows(document):
            print(f"{name}: {text}")
    _correct_status(document)


def list_command(root: Annotated[Path, typer.Argument(help="Folder of runs.")] = RUNS, as_json: AsJson = False) -> None:
    """List the runs of a folder, the one that wrote last first."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; expected the folder of runs (run.root)")
    documents = report_all(root)
    for problem in {document["slurm_problem"] for document in documents} - {None}:  # one at most
        say(problem)
    for folder in sorted(root.iterdir()):
        if folder.is_dir():
            try:
                refuse_unreadable(folder)
            except UserError as error:
                print(f"left out: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps(documents, ensure_ascii=False, indent=1))
        return
    print_table(_COLUMNS, [list_row(document, time.time()) for document in documents])


def status_rows(document: Document) -> Iterator[tuple[str, str]]:
    """The known entries of the document as printed rows."""
    now = float(document["time"])
    yield "folder", document["folder"]
    yield from _job_rows(document, now)
    if document["state"] is not None:
        is_start = document["state"] == "starting" and document["attempt"] is not None
        why = f"; {document['failure_reason']}" if document["failure_reason"] else ""
        yield "state", f"starting (attempt {document['attempt']})" if is_start else document["state"] + why
    yield from _progress_rows(document, now)
    yield from _history_rows(document, now)
    if document["mlflow_run_id"]:
        yield "mlflow", f"run {document['mlflow_run_id']} on {document['mlflow_uri']}"
    yield from ((name, document[name]) for name in ("log", "next") if document[name])
    yield from (("warning", text) for text in document["warnings"])


def _correct_status(document: Document) -> None:
    """Corrects the status of a killed run, which is RUNNING in MLflow until a command corrects it.

    Nothing is done for a run that a process trains, whatever Slurm reports, or in a read-only folder.
    """
    run_dir = RunDir(Path(document["folder"]))
    said = status_said(run_dir) if os.access(run_dir.path, os.W_OK) else None
    if said is None:
        return
    is_by_hand = read_record(run_dir.state).get("slurm_job_id") is None
    status = status_found(document, said, is_by_hand=is_by_hand)
    if status is None and (is_alive(document) or has_arrived(run_dir)):
        return
    sys.stdout.flush()
    logging.getLogger("dist_transformer.tracking").setLevel(logging.ERROR)  # the message below is enough
    try:
        config = load_config(run_dir.config, check_files=False)
        with while_nobody_trains(run_dir) as is_free:
            if not (is_free and config.tracking.enabled):
                return
            problem = settle(run_dir, status or said, config.tracking, Path(config.run.root), CORRECTION_SECONDS)
    except (UserError, OSError) as error:
        problem = str(error)
    now = status or said
    before = f"had {said} as the status of this run" if status else f"did not have {said} as the status of this run"
    sent = f"it is {now} now" if problem is None else f"{now} was not sent: {problem}"
    print(f"MLflow {before}; {sent}", file=sys.stderr)


def list_row(document: Document, now: float) -> tuple[str, ...]:
    """Row of a run in the table of `list`."""
    job = f"{document['job_id']} {document['job_state'] or ''}".rstrip() if document["job_id"] else "-"
    record = document["record_time"]
    return (
        document["run"],
        document["state"] or "-",
        job,
        "-" if document["step"] is None else f"{document['step']}/{document['max_steps'] or '?'}",
        _number(document["loss"], ".4f"),
        "-" if record is None else f"{duration(now - record)} ago",
        document["checkpoint"] or "-",
    )


def _job_rows(document: Document, now: float) -> Iterator[tuple[str, str]]:
    job = document["job"]
    if document["job_id"] is None:
        yield "job", "none: it was not given to Slurm"
    if job is None:
        return
    yield "job", f"{job['id']} {job['state']}" + (f" ({job['reason']})" if job["reason"] else "")
    if job["state"] == "PENDING":
        yield "waits", job["reason_text"]
        if job["start_time"] and not is_held(job["reason"] or ""):
            yield "begins", f"in about {duration(job['start_time'] - now)}, as Slurm estimates"
    if job["nodes"]:
        count = "1 node" if job["num_nodes"] == 1 else f"{job['num_nodes']} nodes"
        yield "nodes", f"{job['nodes']} ({count}), partition {job['partition']}"
    if job["seconds_left"] is not None:
        yield "time left", f"{duration(job['seconds_left'])} of the job"


def _progress_rows(document: Document, now: float) -> Iterator[tuple[str, str]]:
    step, most = document["step"], document["max_steps"]
    yield "step", f"{step} of {most} ({min(100, 100 * step / most):.0f} %)" if most else str(step)
    if document["record_time"] is not None:
        yield "loss", _number(document["loss"], ".4f")
        yield "learning rate", _number(document["learning_rate"], ".3e")
        yield "speed", f"{_number(document['tokens_per_second'], ',.0f')} target tokens/s"
        yield "last record", f"{duration(now - document['record_time'])} ago"
    if document["seconds_to_last_step"] is not None:
        yield "to the last step", f"about {duration(document['seconds_to_last_step'])} at this speed"
    if (validation := document["validation"]) is not None:
        from dist_transformer.reporting.formatting import scores_text  # imports numpy

        yield "validation", f"{scores_text(validation)} at step {validation['step']}"
    if document["checkpoint"]:
        yield "checkpoint", f"{document['checkpoint']}, {duration(document['checkpoint_age_seconds'])} old"
    else:
        yield "checkpoint", "none yet"
    if document["set_aside"]:
        yield "set aside", ", ".join(document["set_aside"])
    if document["heartbeat_time"] is not None:
        yield "heartbeat", f"{duration(now - document['heartbeat_time'])} ago, from {document['owner'].get('host')}"


def _history_rows(document: Document, now: float) -> Iterator[tuple[str, str]]:
    if document["starts"]:
        yield "starts", str(document["starts"])
    if document["last_exit_text"] is not None:
        yield "last end", _ending(document, now)
    if document["goodput"] is not None:
        yield "goodput", goodput_text(Goodput(**document["goodput"]))
    for node, reason in document["excluded_nodes"].items():
        yield "excluded node", f"{node}: {reason}"
    if document["divergences"]:
        yield "divergences", f"{document['divergences']}; the last: {document['last_divergence']}"


def _ending(document: Document, now: float) -> str:
    """End of the newest attempt that has ended, without repetitions."""
    text, code = document["last_exit_text"], document["last_exit_code"]
    if code is None:
        see = f"; see dist-transformer logs {shlex.quote(document['folder'])}" if document["log"] else ""
        return f"{text}{see}"
    number = "" if f"exit code {code}" in text else f" (exit code {code})"
    ended, reason = document["last_end_time"], document["last_end_reason"]
    when = f", {duration(now - ended)} ago" if ended else ""
    why = f"; {reason}" if reason and reason not in SAID_BY_EXIT_CODE else ""
    return f"{text}{number}{when}{why}"


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else str(value if value is not None else "-")
