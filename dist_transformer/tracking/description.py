"""Standard tags and description of a run in MLflow: who started it, with which command, and a short summary."""

import contextlib
import getpass
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GIT_COMMIT = "git_commit"
"""Our tag with the version of the code; MLflow uses another name for it."""

_WORDS = {"model": "{} model", "languages": "{}", "precision": "{}"}
_COUNTS = {"num_ranks": "rank", "num_nodes": "node"}


def standard_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags that MLflow's pages have columns for: user, source, git commit."""
    found = {
        "mlflow.source.name": " ".join(["dist-transformer", *sys.argv[1:]]),
        "mlflow.source.type": "JOB" if "SLURM_JOB_ID" in os.environ else "LOCAL",
    }
    with contextlib.suppress(KeyError, OSError, ImportError):  # a container may not know the user's name
        found["mlflow.user"] = getpass.getuser()
    if GIT_COMMIT in tags:
        found["mlflow.source.git.commit"] = tags[GIT_COMMIT]
    return found


def description(tags: Mapping[str, str], datasets: Sequence[Mapping[str, Any]], run_folder: Path) -> str:
    """A few lines in Markdown: model, corpora, hardware, location of the run folder. Unknown items are omitted:

    base model of 63,000,000 parameters, en-de, fp16, 16 ranks, 2 nodes
    - wmt14 (training): 4,500,000 rows
    - run folder: n1:/runs/wmt14
    """
    first = [text.format(tags[key]) for key, text in _WORDS.items() if key in tags]
    first += [f"{tags[key]} {noun}{'' if tags[key] == '1' else 's'}" for key, noun in _COUNTS.items() if key in tags]
    if {"model", "num_parameters"} <= tags.keys():
        first[0] += f" of {int(tags['num_parameters']):,} parameters"
    lines = [", ".join(first), *(f"- {_corpus(values)}" for values in datasets)]
    return "\n".join([*lines, f"- run folder: {platform.node()}:{run_folder.absolute()}"])


def _corpus(values: Mapping[str, Any]) -> str:
    context = f" ({values['context']})" if "context" in values else ""
    rows = f": {values['rows']:,} rows" if "rows" in values else ""
    return f"{values['name']}{context}{rows}"
