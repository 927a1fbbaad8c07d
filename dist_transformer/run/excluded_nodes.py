"""Nodes that a run excludes from its own jobs: the preflight found them faulty, or training did, twice, or one went down
with the batch script.

They are few: a fault of the program must not be taken for a fault of the cluster.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record, read_record_patiently


def excluded_nodes(run_dir: RunDir) -> dict[str, str]:
    """Returns the excluded nodes, each with its reason."""
    return {node: reason for node, reason in read_record(run_dir.excluded).items() if isinstance(reason, str)}


def exclude(run_dir: RunDir, found: Mapping[str, str], num_nodes: int, num_spare: int) -> dict[str, str]:
    """Excludes nodes, in their order, as long as the limits allow; returns the added ones with their reasons.

    Over all attempts of a run a tenth of its nodes are excluded at most, one if it has fewer than ten; now
    `num_spare` at most.

    Args:
        num_nodes: nodes of the job.
        num_spare: further nodes that could serve it; all that were found, where the job rather waits for one.
    """
    before = read_record_patiently(run_dir.excluded)
    room = min(max(1, num_nodes // 10) - len(before), num_spare)
    new = [node for node in found if node not in before][: max(0, room)]
    if new:
        write_json(run_dir.excluded, {**before, **{node: found[node] for node in new}})
    return {node: found[node] for node in new}


def reasons_of_preflight(report: Path) -> dict[str, str]:
    """Returns the nodes that a preflight wants excluded, each with its faults."""
    found: dict[str, Any] = read_json(report)
    faults = {node: [each["text"] for each in found["outliers"] if each["node"] == node] for node in found["exclude"]}
    return {node: "preflight: " + ("; ".join(texts) or "no answer") for node, texts in faults.items()}
