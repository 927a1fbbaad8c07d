"""A pipeline as jobs of a real Slurm that wait for each other."""

import subprocess
from pathlib import Path

import pytest
from slurm_runs import program
from slurm_test_cluster import PATIENCE_SECONDS, SlurmCluster, wait_until

from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.files import read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
FILE = """
root: {folder}/root
data_root: {folder}
set:
  data:
    train: {{source: en, target: de}}
    filters: {{max_tokens: 96}}
    lanes: 2
    max_tokens: 1024
  tokenizer: {{vocabulary_size: 300}}
  model: {{preset: tiny, d_model: 32, d_ff: 64, num_encoder_layers: 1, num_decoder_layers: 1}}
  schedule: {{warmup_steps: 2}}
  training: {{max_steps: 6, precision: fp32}}
  checkpoints: {{every_steps: 3}}
  tracking: {{enabled: false}}
  slurm: {{time_limit: "30:00", srun: {{cpu-bind: null}}}}
nodes:
  corpus: {{kind: prepare}}
  teacher: {{kind: train, slurm: {{ranks_per_node: 2}}, set: {{data: {{prepared: {{node: corpus}}}}}}}}
  forward: {{kind: translate, model: {{node: teacher}}, input: en, slurm: {{nodes: 2}}}}
  agreement: {{kind: score, model: {{node: teacher}}, source: en, target: {{node: forward}}}}
  kept: {{kind: filter, source: en, target: {{node: forward}}, scores: {{node: agreement}}, drop: 0.1}}
  scores: {{kind: evaluate, model: {{node: teacher}}, source: en, reference: de}}
"""

OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}


def ids_of(said: str) -> list[str]:
    return [line.split()[2].rstrip(":") for line in said.splitlines() if line.startswith("submitted")]


def test_each_node_is_a_job_that_waits_for_those_it_reads_and_is_not_done_twice(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    pairs = [pair for _, pair in zip(range(600), demo_pairs("train"), strict=False)]
    for side, name in enumerate(("en", "de")):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    file, root = tmp_path / "pipeline.yaml", tmp_path / "root"
    file.write_text(FILE.format(folder=tmp_path))

    def submit(*overrides: str) -> str:
        return slurm_cluster.run(*program("submit", "--pipeline", str(file), *overrides))

    def logs() -> str:
        return "\n".join(path.read_text() for path in root.glob("*/slurm/*.log"))

    def wait_for(said: str) -> None:
        for job_id in ids_of(said):
            wait_until(lambda job_id=job_id: slurm_cluster.state(job_id) in OVER, PATIENCE_SECONDS, logs)
            assert slurm_cluster.state(job_id) == "COMPLETED", logs()

    held = ids_of(submit("set.slurm.sbatch.hold=true"))
    shown = slurm_cluster.run(*program("pipeline", "status", str(file)))
    assert shown.count(" pending ") == 6, shown
    for command in (("pipeline", "run", str(file)), ("submit", "--pipeline", str(file))):
        done = subprocess.run(
            program(*command), env=slurm_cluster.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "works on it" in done.stderr
    slurm_cluster.run("scancel", *held)

    said = submit()
    assert "6 jobs for 6 nodes" in said
    shown = slurm_cluster.run(*program("pipeline", "status", str(file)))
    assert all(line.split("|")[3].split()[0] in ("job", "done") for line in shown.splitlines()[2:]), shown
    file.write_text("root: edited")  # after the submission it changes nothing
    wait_for(said)
    file.write_text(FILE.format(folder=tmp_path))
    shown = slurm_cluster.run(*program("pipeline", "status", str(file)))
    assert shown.count("| done ") == 6, shown
    took = {line.split("|")[1].strip(): line.split("|")[5].strip() for line in shown.splitlines()[2:]}
    assert {name for name, time in took.items() if time == "-"} == {"corpus", "forward"}, shown
    assert read_json(root / "kept" / "counts.json") == {"lines": 600, "kept_lines": 540}
    assert "2 ranks on" in logs()
    assert len((root / "forward" / "text").read_text(encoding="utf-8").splitlines()) == 600

    assert "0 jobs for 6 nodes" in submit()
    said = submit("nodes.agreement.max_source_tokens=500")
    assert [line.split()[3] for line in said.splitlines()[:-1] if line.startswith("submitted")] == ["agreement", "kept"]
    wait_for(said)
    assert (root / "kept" / "source").read_bytes() == (root / "kept.1" / "source").read_bytes()
