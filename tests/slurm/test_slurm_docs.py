"""Every command of docs/slurm.md, in its order, on a real cluster."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from slurm_test_cluster import HERE, SlurmCluster, wait_until

from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.run.metrics_log import read_records

REPOSITORY = HERE.parents[1]
PAGE = (REPOSITORY / "docs" / "slurm.md").read_text(encoding="utf-8")
FILES = dict(
    zip(("my.yaml", "clusters/ours.yaml", "rates.yaml"), re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL), strict=True)
)
COMMANDS = re.findall(r"^\$ (.+)$", PAGE, re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with the page's files and a little text."""
    for name in ("slurm", "launch", "dist_transformer"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    for part, count in (("train", 300), ("valid", 20), ("test", 20)):
        pairs = [pair for _, pair in zip(range(count), demo_pairs("train"), strict=False)]
        for number, language in enumerate(("en", "de")):
            (tmp_path / f"{part}.{language}").write_text("".join(f"{pair[number]}\n" for pair in pairs))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slurm
@pytest.mark.slow
def test_every_command_of_the_page_does_what_it_says(slurm_cluster: SlurmCluster, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}:{slurm_cluster.environment['PATH']}"
    cluster = SlurmCluster(slurm_cluster.folder, {**slurm_cluster.environment, "PATH": path})

    def jobs(state: str) -> set[str]:
        return set(cluster.run("squeue", "--noheader", f"--states={state}", "--format=%i %j %T %r").splitlines())

    before = jobs("all")
    said = {command: cluster.run(*shlex.split(command), cwd=folder) for command in COMMANDS}
    wait_until(lambda: not jobs("PENDING,RUNNING,COMPLETING") - before, 600, lambda: "\n".join(jobs("all")))
    # The preflight ends with 3 where a node stands out, as one may on a machine that all nodes share.
    unfinished = [line for line in jobs("all") - before if "COMPLETED" not in line and "preflight" not in line]
    assert unfinished == []
    assert len(list(folder.glob("preflight-*/report.json"))) == 1
    runs = folder / "runs"
    finished = [runs / "my-first", *(runs / "rates" / name for name in ("fast", "slow")), runs / "whole", runs / "by-hand",
                runs / "seed_1", runs / "seed_2"]  # fmt: skip
    assert [str(run) for run in finished if '"finished"' not in (run / "run.json").read_text()] == []
    assert list((runs / "whole" / "evaluation").iterdir())
    assert "exit code 0" in said["dist-transformer logs runs/my-first --follow"]
    assert "BLEU" in said["dist-transformer evaluate runs/my-first"]
    rows = json.loads(cluster.run("dist-transformer", "list", "runs/rates", "--json", cwd=folder))
    assert {row["run"]: row["state"] for row in rows} == {"fast": "finished", "slow": "finished"}
    digests = [{record["batch_digest"] for record in read_records(runs / f"seed_{seed}" / "metrics.jsonl")
                if record["event"] == "train"} for seed in (1, 2)]  # fmt: skip
    assert digests[0].isdisjoint(digests[1])
