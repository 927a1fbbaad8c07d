"""Running of nodes: each is a verb in a process of its own, which resumes by itself what it was stopped or killed in."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Literal

from dist_transformer.config.loading import to_yaml, with_absolute_paths
from dist_transformer.errors import EXIT_DONE, EXIT_REQUEUE, UserError, say
from dist_transformer.files import flush_to_disk, write_json, write_text
from dist_transformer.pipeline.schema import CONFIGURED, KINDS, PLACES, RECORD, SETTINGS, Pipeline
from dist_transformer.pipeline.state import State, check_unchanged, complete, configuration, is_complete, take_back
from dist_transformer.processes.children import Signals
from dist_transformer.processes.launching import run_program
from dist_transformer.run.folder import RunDir
from dist_transformer.run.lock import RunLock, while_nobody_trains
from dist_transformer.run.outputs import check_output, holds_only
from dist_transformer.run.records import read_record_patiently


@contextmanager
def locked(folder: Path, wait_seconds: float = 1.0) -> Iterator[None]:
    """Context in which no other process runs the pipeline, or the node, of this folder. Raises UserError if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(RunDir(folder), wait_seconds)
    try:
        lock.acquire()
    except UserError as error:
        who = str(error).partition(";")[0].replace("this run folder", "it")
        rule = "a pipeline, and each node, is run by one process at a time; wait, or stop that one"
        raise type(error)(f"{who}: {rule}") from None
    try:
        yield
    finally:
        lock.release()


def run_due(pipeline: Pipeline, states: dict[str, State], signals: Signals) -> int:
    """Runs the nodes that are due, in order; returns 0, or the first other exit code. Raises UserError: one has changed."""
    for name, state in ((name, state) for name, state in states.items() if state.is_due):
        if signals.came:
            return EXIT_REQUEUE
        why = state.why or ("begins" if state.restarts else "resumes")
        check_unchanged(pipeline, name, states)
        say(f"node {name} ({pipeline.nodes[name].kind}): {why}")
        begin(pipeline, name, state)
        if (code := run_node(pipeline, name, signals)) != EXIT_DONE:
            again = "; the same command resumes it" if code == EXIT_REQUEUE else ""
            say(f"node {name}: ended with exit code {code}{again}")
            return code
    return EXIT_DONE


def set_aside(pipeline: Pipeline, states: dict[str, State]) -> dict[str, State]:
    """Renames the folders of nodes that begin anew, takes back what fits, and completes the records of nodes that have ended.

    Returns the states after it. Raises UserError, and renames nothing, if a folder is not a node's, or a process works in it.
    """
    for name, state in states.items():
        if state.record and is_complete(pipeline, name):
            complete(pipeline, name)
    folders = [at for name, state in states.items() if state.restarts and (at := pipeline.folder(name)).exists()]
    for folder in folders:
        if not holds_only(folder, [RunDir(folder).lock]):  # else it was killed before its record was there
            check_output(folder, "a node of a pipeline", lambda at: "key" in read_record_patiently(at / RECORD))
    for folder in dict.fromkeys([*folders, *map(pipeline.folder, readers_of(pipeline, states))]):
        with while_nobody_trains(RunDir(folder)) as is_free:
            if not is_free:
                why = "must begin anew" if folder in folders else "reads what must begin anew"
                raise UserError(f"{folder}: {why}, but a process works in it: wait for it, or stop it first")
    for folder in folders:
        old = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.{n}")).exists())
        folder.rename(old)
        say(f"{folder}: begins anew; what was there is kept as {old.name}")
    return take_back(pipeline, states)


def readers_of(pipeline: Pipeline, states: dict[str, State]) -> list[str]:
    """Names of nodes that read one which begins anew, whether this file has them, or had them, or another one of this root."""
    anew = {name for name, state in states.items() if state.restarts}
    records = {path.parent.name: path for path in pipeline.root.glob(f"*/{RECORD}") if "." not in path.parent.name}
    # Those with a dot are set aside.
    made_of = {name: read_record_patiently(path).get("made_of", {}) for name, path in records.items()}
    return [name for name, of in made_of.items() if anew & {*of.get("nodes", ())}]


def begin(pipeline: Pipeline, name: str, state: State, moment: Literal["begun", "submitted"] = "begun") -> None:
    """Writes the record of a node that begins, or is submitted, and its configuration."""
    folder = pipeline.folder(name)
    record = state.now if state.restarts else {key: each for key, each in state.record.items() if key != "ended"}
    write_json(folder / RECORD, {moment: round(time.time(), 3), **record})
    if pipeline.nodes[name].kind in CONFIGURED:
        write_text(folder / SETTINGS, to_yaml(with_absolute_paths(configuration(pipeline, name), None)))


def run_node(pipeline: Pipeline, name: str, signals: Signals) -> int:
    """Runs a node that has begun; returns the exit code of its verb. A run folder is locked by `train` itself."""
    node, folder, code = pipeline.nodes[name], pipeline.folder(name), EXIT_DONE
    with nullcontext() if node.kind == "train" else locked(folder, wait_seconds=20.0):
        if node.kind == "filter":
            from dist_transformer.pipeline.filtering import filter_files  # numpy, which looking needs not

            source, target, scores = (pipeline.located(node.values[key]) for key in ("source", "target", "scores"))
            try:
                filter_files(source, target, scores, node.values["drop"], folder)
            except UserError as error:
                say(f"dist-transformer: {error}")
                code = error.exit_code
        elif not is_complete(pipeline, name):
            program = [sys.executable, "-m", "dist_transformer", *words_of(pipeline, name)]
            with (folder / ".printed").open("wb") if node.kind == "score" else nullcontext() as printed:
                code = run_program(program, signals, printed)
            if printed and code == EXIT_DONE:
                flush_to_disk(folder / ".printed")
                os.replace(printed.name, folder / "scores")
        if code == EXIT_DONE:
            complete(pipeline, name)
        elif code != EXIT_REQUEUE:
            write_json(folder / RECORD, {**read_record_patiently(folder / RECORD), "ended": code})
    return code


def run_as_job(pipeline: Pipeline, name: str, signals: Signals) -> int:
    """Runs a node that `submit` has begun. Raises UserError if it has not, or if a node that it reads is not done."""
    record = read_record_patiently(pipeline.folder(name) / RECORD)
    if "made_of" not in record:
        raise UserError(f"{pipeline.folder(name)}: has not begun: submit the pipeline, or run it without --node")
    for other in record["made_of"]["nodes"]:
        if not is_complete(pipeline, other):
            raise UserError(f"{pipeline.folder(other)}: not done, and node {name} reads it; submit the pipeline again")
        complete(pipeline, other)
    write_json(pipeline.folder(name) / RECORD, {"begun": round(time.time(), 3), **record})
    return run_node(pipeline, name, signals)


def words_of(pipeline: Pipeline, name: str) -> list[str]:
    """The arguments of `dist-transformer` that run a node."""
    node, folder = pipeline.nodes[name], pipeline.folder(name)
    kind, values = node.kind, node.values
    if kind in CONFIGURED:
        share = "ranks" if kind == "train" else "processes"
        return [kind, str(folder / SETTINGS), f"--{share}={values[share]}"]
    words, options, output = [kind], list[str](), str(folder / KINDS[kind].made[0])
    for key, value in values.items():
        for each in value if isinstance(value, tuple) else (value,):
            if key in ("model", "run"):
                words.append(str(pipeline.located(each)))
            elif key not in ("kind", "slurm") and each is not None and each is not False:
                text = str(pipeline.located(each)) if key in PLACES else str(each)
                options += [f"--{key.replace('_', '-')}", *([] if each is True else [text])]
    last = {"export": [output], "score": ["--per-token", "--too-long", "lowest"]}.get(kind, ["--output", output])
    return [*words, *last, *options] if kind == "export" else [*words, *options, *last]
