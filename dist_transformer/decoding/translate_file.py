"""Translation of a file in parts: by this process, by several that it starts, or by the ranks of a Slurm job."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dist_transformer.config.slurm_schema import SlurmConfig
from dist_transformer.decoding import sharded_files
from dist_transformer.decoding.engines import folders_of, open_search
from dist_transformer.decoding.translation_lines import Task, translated
from dist_transformer.errors import EXIT_REQUEUE, UserError, say
from dist_transformer.format import progress_bar
from dist_transformer.interop.shortlist import VOCABULARY_MAP
from dist_transformer.processes.launching import num_ranks_given
from dist_transformer.processes.stop_request import StopRequest

TELL_SECONDS = 30
_MAX_RESTARTS = SlurmConfig.model_validate({}).max_restarts_without_progress
FILES_OF_A_MODEL = (".json", ".safetensors", ".model", ".bin", VOCABULARY_MAP)


def translate_file(task: Task, source: Path, output: Path, stop: StopRequest) -> None:
    """Translates this rank's unfinished chunks and, after the last of all, joins the output. A stop request exits 75.

    Raises:
        UserError: a file cannot be read or changes, a line cannot be translated, the output belongs to something else,
            or a job that was restarted often is stopped before any part is finished.
        MachineError: the disk is full, or fails.
    """
    num_ranks = num_ranks_given(()) or 1
    rank = int(os.environ.get("RANK", "0"))
    folders = folders_of(task.engine, task.models)
    readers = [sharded_files.LineReader(path) for path in (source, task.prefix) if path is not None]
    plan, num_lines = _plan(task, folders, source)
    lines_of_chunk = sharded_files.chunk_lines(num_lines)
    parts = sharded_files.open_parts(output, plan, -(-num_lines // lines_of_chunk))
    if parts is None:
        if rank == 0:
            say(f"{output}: is there already")
        return
    search = open_search(task.engine, folders, task.settings, task.plugin)
    last_report, num_before = time.monotonic(), parts.num_done()
    with progress_bar() if rank == 0 else nullcontext(lambda stage, done, total: None) as show:

        def after_batch(done: int) -> None:
            show("translating", done, num_lines)
            if done < first + count:  # else the chunk is done, and is written first
                _end_if_stopped(stop, parts, num_before)

        for chunk in range(rank, parts.num_chunks, num_ranks):
            if not parts.is_done(chunk):
                _end_if_stopped(stop, parts, num_before)
                first = chunk * lines_of_chunk
                count = min(lines_of_chunk, num_lines - first)
                lines, *prefixes = (reader.read(first, count) for reader in readers)
                given = prefixes[0] if prefixes else None
                parts.write(chunk, list(translated(task, search, lines, given, first, after_batch)))
            if rank == 0 and time.monotonic() - last_report > TELL_SECONDS:
                say(f"{output}: {parts.num_done()} of {parts.num_chunks} parts")
                last_report = time.monotonic()
    if parts.join():
        say(f"{output}: {num_lines:,} lines translated")


def _plan(task: Task, folders: Sequence[Path], source: Path) -> tuple[dict[str, Any], int]:
    """Everything that the output depends on, and the number of lines.

    Batch sizes are excluded, unless there is a shortlist: a translation then has the tokens of its batch. `too_long` is
    excluded too, so that a translation can resume after a refused line by cutting it.
    """
    digest, num_lines = sharded_files.digest_and_lines(source)
    plan: dict[str, Any] = {
        "input": digest,
        "lines": num_lines,
        "engine": task.engine,
        "alignment": task.alignment,
        "json": task.as_json,
    }
    if task.mbr:
        plan["mbr"] = True
    if task.prefix is not None:
        plan["prefixes"], num_prefixes = sharded_files.digest_and_lines(task.prefix)
        if num_prefixes != num_lines:
            raise UserError(
                f"{task.prefix}: {num_prefixes} prefixes for the {num_lines} lines of {source}: expected one for each, on a line "
                "of its own; an empty one leaves the translation free"
            )
    for number, folder in enumerate(folders, start=1):
        files = sorted(file for file in folder.iterdir() if file.name.endswith(FILES_OF_A_MODEL))
        plan |= {f"model {number}: {file.name}": sharded_files.digest_of(file) for file in files}
    has_shortlist = any(name.endswith(VOCABULARY_MAP) for name in plan)
    settings = task.settings.model_dump(exclude={"too_long"} if has_shortlist else {"max_tokens", "too_long"})
    plan |= {f"decoding.{name}": value for name, value in settings.items()}
    return plan, num_lines


def _end_if_stopped(stop: StopRequest, parts: sharded_files.Parts, num_before: int) -> None:
    """Ends the process after a stop request; a chunk that was begun is repeated later.

    A Slurm job that was requeued several times ends if no rank finished a part since this start, when there were
    `num_before`: otherwise a part that takes longer than the job's time limit would requeue it forever.
    """
    if (reason := stop.reason()) is None:
        return
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if restarts >= _MAX_RESTARTS and parts.num_done() == num_before:
        raise UserError(
            f"{parts.output}: stopped ({reason}) after {restarts} restarts of its job, and no part was done since the "
            f"last: {num_before} of {parts.num_chunks} are; give the job more time (--time) or more tasks, and "
            "submit it again: what is done is kept"
        )
    say(f"stopped while translating ({reason}); the same command resumes it")
    sys.exit(EXIT_REQUEUE)
