"""Text files of the pairs of the training corpora that the rules of data.filters keep, and of those that they drop.

docs/data.md names the files; clean.json is written last: a folder that has one is complete. They are made in OUT/.clean,
which one process holds locked, and renamed when all are complete; the command begins anew if it was killed.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dist_transformer.config.schema import Config
from dist_transformer.data.filters import Cleaner
from dist_transformer.data.prepare.chunks import BATCH_ROWS, CHUNK_ROWS
from dist_transformer.data.prepare.duplicates import BatchKeys, Comparison, batch_keys, load_repeated, save_keys
from dist_transformer.data.prepare.scan import ReportProgress, at_commits, read_held_out
from dist_transformer.data.sources.corpus import hub_commits, read_corpus
from dist_transformer.errors import UserError
from dist_transformer.files import flush_to_disk, read_json, write_json
from dist_transformer.run.lock import take
from dist_transformer.run.outputs import check_output, holds_only, writing

WORK_FOLDER, LABEL, REPORT_NAME = ".clean", "data-clean.unfinished", "clean.json"


def clean(config: Config, out: Path, progress: ReportProgress) -> dict[str, Any]:
    """Writes the files of all training corpora; returns the content of clean.json. Raises UserError: `out` has something
    that is not ours, another process cleans into it, or it cannot be written; DataError: a corpus cannot be read, or a
    rule cannot be applied to it."""
    check_output(out, "a folder of cleaned text", is_cleaned)
    config = at_commits(config, hub_commits(config.data.training_corpora().values()))  # for all passes over the text
    with writing(out), _work_folder(out) as work:
        if (held_out := read_held_out(config)) is not None:
            held_out.save(work)
        cleaners = {name: Cleaner.of(name, config.data, work) for name in config.data.training_corpora()}
        rules = {name: own for name, each in cleaners.items() if (own := each.repetition_rules())}
        if rules:
            keys = [(_save_keys(config, name, cleaners[name], work, progress), own) for name, own in rules.items()]
            comparison = Comparison(keys, lambda: progress("duplicates", 0, None))
            for part in range(comparison.num_parts):
                comparison.find(part)
            comparison.mark()
        made = {name: _write(config, name, each, work, progress) for name, each in cleaners.items()}
        (out / REPORT_NAME).unlink(missing_ok=True)
        for path in [path for _, paths in made.values() for path in paths]:
            flush_to_disk(path)
            os.replace(path, out / path.name)
        report = {"corpora": {name: counts for name, (counts, _) in made.items()}}
        write_json(out / REPORT_NAME, report)
    return report


def is_cleaned(folder: Path) -> bool:
    """True if `clean` wrote in this folder, and its work folder is none of another program."""
    work = folder / WORK_FOLDER
    with suppress(FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        is_free = not work.exists() or not any(work.iterdir())
        is_begun = (work / LABEL).is_file() or (is_free and holds_only(folder, [work]))
        return is_begun or (is_free and "corpora" in read_json(folder / REPORT_NAME))
    return False


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """Yields the work folder, locked by its label, which goes last: what a killed process leaves is known as ours."""
    work, label = out / WORK_FOLDER, out / WORK_FOLDER / LABEL
    work.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # another process ends; the lock makes the folder again
        label.touch()
    lock = FileLock(label, fallback_to_soft=False)
    try:
        take(lock, 0)
    except Timeout:
        raise UserError(f"{out}: another process cleans into it; wait until it ends, or give another path") from None
    try:
        for left_over in {*work.iterdir()} - {label}:
            left_over.unlink()
        yield work
        for path in sorted(work.iterdir(), key=label.__eq__):
            path.unlink()  # the label while it is held: no lock is taken on a file that is gone
    finally:
        lock.release()
    with suppress(OSError):  # another process begins
        work.rmdir()


def _save_keys(config: Config, name: str, cleaner: Cleaner, work: Path, progress: ReportProgress) -> list[Path]:
    """Writes the keys of a corpus, chunk by chunk; returns the paths for `Comparison`."""
    paths, corpus = list[Path](), config.data.training_corpora()[name]
    batches = read_corpus(corpus, config.data, BATCH_ROWS, scores=cleaner.settings.scores)
    for path, of_chunk in groupby(batches, lambda batch: _chunk(work, name, batch.first_row)):
        keys: list[BatchKeys] = []
        for batch in of_chunk:
            keys.append(batch_keys(cleaner.clean(batch), batch.first_row))
            progress(f"{name} keys", batch.first_row, None)
        save_keys(path, keys)
        paths.append(path)
    return paths


def _write(
    config: Config, name: str, cleaner: Cleaner, work: Path, progress: ReportProgress
) -> tuple[dict[str, Any], list[Path]]:
    """Writes the pairs of a corpus; returns their counts and the files. Line ends and tabs in a pair become spaces."""
    source, target = languages = config.data.languages_of(config.data.training_corpora()[name])
    sides = ("source", "target") if source == target else languages
    paths = [work / f"{name}.{ending}" for ending in (*sides, "dropped.tsv")]
    dropped, pairs, kept, repaired = Counter[str](), 0, 0, 0
    rules, corpus = [*cleaner.repetition_rules()], config.data.training_corpora()[name]
    with ExitStack() as stack:
        outputs = [stack.enter_context(path.open("w", encoding="utf-8", newline="\n")) for path in paths]
        for batch in read_corpus(corpus, config.data, BATCH_ROWS, scores=cleaner.settings.scores):
            text = cleaner.clean(batch, load_repeated(_chunk(work, name, batch.first_row), rules))
            bare = [source.removeprefix(batch.prefix) for source in text.source]
            for output, side in ((outputs[0], bare), (outputs[1], text.target)):
                output.writelines(line.replace("\n", " ") + "\n" for line in side)
            for place, rule in sorted((place, rule) for rule, places in text.dropped.items() for place in places):
                pair = (batch.source[place] or "").removeprefix(batch.prefix), batch.target[place] or ""
                cells = (rule, str(batch.first_row + place + 1), *(side.replace("\t", " ") for side in pair))
                outputs[2].write("\t".join(cells).replace("\n", " ") + "\n")
            dropped += text.counts()
            pairs, kept, repaired = pairs + len(batch.source), kept + len(text.source), repaired + text.repaired
            progress(name, pairs, None)
    return {"pairs": pairs, "kept": kept, "repaired": repaired, "dropped": dict(dropped)}, paths


def _chunk(work: Path, name: str, row: int) -> Path:
    return work / f"{name}-{row // CHUNK_ROWS:05d}"
