"""Handling of a store without a server that was moved together with its runs.

MLflow writes the absolute path of every artifact into its database. Without an update the next upload would create the
old folder again, and the page would show no file.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from dist_transformer.tracking.outbox import Target

LOCK_SECONDS = 60
_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def follow_moved_artifacts(target: Target, run_id: str, artifact_uri: str) -> None:
    """Updates the paths in the database if its artifacts lie next to it and not where this run has them. Raises
    OSError, sqlite3.Error: the database cannot be written now."""
    database = Path(target.uri.removeprefix("sqlite:///"))
    new, old = target.artifact_root, artifact_uri.removesuffix(f"/{run_id}/artifacts")
    if database.parent != new.parent or not old.startswith("file:") or old == new.as_uri():
        return
    if Path(unquote(urlsplit(old).path)).exists():
        return
    with FileLock(f"{database}.lock", timeout=LOCK_SECONDS), closing(sqlite3.connect(database)) as store, store:
        for table, column in _PLACES:
            change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?"
            store.execute(change, (new.as_uri(), len(old) + 1, len(old) + 1, f"{old}/"))
