"""Reads the ranks' files of a preflight and reports bad nodes. Needs no torch, and not every rank's file.

    python -m dist_transformer.preflight.report FOLDER TOLERANCE [NODE ...]

FOLDER holds a file rank_N.json of each rank that got so far. Written next to them: report.json, and `exclude` with the
nodes to exclude, if any. Exit codes: 0 none, 3 some, 1 no rank wrote anything, 2 wrong arguments.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR
from dist_transformer.files import read_json, write_json, write_text
from dist_transformer.format import table
from dist_transformer.preflight.outliers import DONE, MEASURES, Judgement, Record, judge

EXIT_EXCLUDE = 3
"""Exit code if there are nodes to exclude."""


def rank_file(folder: Path, rank: int) -> Path:
    """Path of the file of `rank`."""
    return folder / f"rank_{rank}.json"


def begin_anew(folder: Path) -> None:
    """Removes the ranks' files and `exclude` of an earlier preflight. Raises UserError: an unrelated file has such a
    name, or the folder cannot be written."""
    # They import pydantic, which a batch script's own Python may lack.
    from dist_transformer.run.outputs import check_output
    from dist_transformer.run.records import read_record

    ranks = [*folder.glob("rank_*.json")]
    for path in ranks:
        check_output(
            path, "a record", lambda path: read_record(path).keys() >= {"rank", "num_ranks", "together"}, is_file=True
        )
    report = folder / "report.json"
    check_output(
        report, "a report", lambda path: read_record(path).keys() >= {"medians", "outliers", "exclude"}, is_file=True
    )
    check_output(folder / "exclude", "a list of nodes", lambda _: report.is_file(), is_file=True)
    for path in (*ranks, folder / "exclude"):
        path.unlink(missing_ok=True)


def write_report(folder: Path, nodes: list[str], tolerance: float) -> Judgement:
    """Judges the nodes and writes report.json and `exclude`."""
    records: list[Record] = [read_json(path) for path in sorted(folder.glob("rank_*.json"))]
    found = judge(records, nodes, tolerance)
    report = {
        "nodes": found.values,
        "medians": found.medians,
        "outliers": [{**asdict(outlier), "text": outlier.text} for outlier in found.outliers],
        "silent": found.silent,
        "warnings": [*found.warnings, *_failures(records)],
        "exclude": found.exclude,
        "complete": found.complete,
        "num_ranks": max((int(record["num_ranks"]) for record in records), default=0),
        "device": next((record["device"] for record in records), ""),
    }
    write_json(folder / "report.json", report)
    if found.exclude:
        write_text(folder / "exclude", ",".join(found.exclude) + "\n")
    return found


def shown(report: dict[str, Any]) -> str:
    """Table of the nodes, the outliers, and the option that excludes the bad nodes from a job."""
    lines = [f"preflight of {len(report['nodes'])} nodes, {report['num_ranks']} ranks ({report['device']})"]
    lines += _table(report["nodes"], report["medians"])
    lines += [f"{found['node']}: {found['text']}" for found in report["outliers"]]
    lines += [f"{node}: wrote nothing within the time limit" for node in report["silent"]]
    lines += [f"warning: {text}" for text in report["warnings"]]
    if not report["complete"]:
        lines.append("not complete: the ranks were not all measured together, so that a bad network has no name")
    elif not report["outliers"]:
        lines.append("no node stands out")
    if report["exclude"]:
        lines.append(f"--exclude={','.join(report['exclude'])}")
    return "\n".join(lines)


def _table(nodes: dict[str, dict[str, float]], medians: dict[str, float]) -> list[str]:
    known = [measure for measure in MEASURES if measure.name in medians and measure.name != "ranks"]
    rows = [["", *(measure.unit for measure in known)]]
    for node, values in [*nodes.items(), ("median", medians)]:
        rows.append([node, *(f"{values[m.name]:.3g}" if m.name in values else "-" for m in known)])
    return table(["node", *(measure.title for measure in known)], rows)


def _failures(records: list[Record]) -> list[str]:
    """Reasons of the ranks that did not complete the joint measurements, each with its ranks."""
    by_reason: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda record: int(record["rank"])):
        if record["together"] != DONE:
            by_reason.setdefault(str(record["together"]), []).append(str(record["rank"]))
    return [f"rank {', '.join(ranks)}: {reason}" for reason, ranks in by_reason.items()]


def main(arguments: list[str]) -> int:
    """Command that the batch script runs after the ranks; returns the exit code."""
    try:
        folder, tolerance, nodes = Path(arguments[0]), float(arguments[1]), arguments[2:]
    except (IndexError, ValueError):
        print(f"expected: FOLDER TOLERANCE [NODE ...]; got: {' '.join(arguments) or 'nothing'}", file=sys.stderr)
        return EXIT_USER_ERROR
    found = write_report(folder, nodes, tolerance)
    if not found.values:
        print(f"preflight: no rank wrote a file into {folder}; the lines above say why", file=sys.stderr)
        return EXIT_FAILED
    print(shown(read_json(folder / "report.json")), flush=True)
    return EXIT_EXCLUDE if found.exclude else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
