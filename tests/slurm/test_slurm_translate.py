"""A file translated by the ranks of a job on a real Slurm, stopped and requeued, is the one that a single process makes."""

import sys
from pathlib import Path

import pytest
from slurm_test_cluster import HERE, PATIENCE_SECONDS, SlurmCluster, wait_until

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.schema import DecodingConfig, ModelConfig
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.decoding.translate_file import translate_file
from dist_transformer.decoding.translation_lines import Task
from dist_transformer.interop.model_folder import ModelInformation, TokenizerFiles, save_model_folder
from dist_transformer.model.transformer import Transformer
from dist_transformer.processes.stop_request import StopRequest

REPOSITORY = HERE.parents[1]
LINES = [source for _, (source, _) in zip(range(1500), demo_pairs("train"), strict=False)]
CONFIG = ModelConfig(d_model=32, d_ff=64, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}


def make_model(folder: Path) -> Path:
    """A model folder with random weights."""
    train_tokenizer(iter(LINES), TokenizerConfig(vocabulary_size=200), folder / "one.model")
    tokenizer = Tokenizer.load(folder / "one.model")
    size, ids = tokenizer.source_vocabulary, (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
    model = Transformer(CONFIG, size, size, tokenizer.pad_id)
    information = ModelInformation(size, size, *ids, "en", "de", 1)
    weights = dict(model.named_parameters())
    save_model_folder(folder / "model", weights, CONFIG, TokenizerFiles(folder / "one.model"), information)
    return folder / "model"


@pytest.mark.slurm
@pytest.mark.slow
def test_the_ranks_of_a_job_that_is_stopped_and_requeued_translate_a_file(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    model, source, output = make_model(tmp_path), tmp_path / "source", tmp_path / "out put"
    source.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    cluster = SlurmCluster(
        slurm_cluster.folder, {**slurm_cluster.environment, "DIST_TRANSFORMER_PYTHON": sys.executable}
    )
    job = ("sbatch", "--parsable", "--nodes=2", "--ntasks=2", f"--output={tmp_path}/job.log", "slurm/translate.sbatch")
    options = ("--input", str(source), "--output", str(output), "--beam", "2", "--max-tokens", "500")
    job_id = cluster.run(*job, str(model), *options, cwd=REPOSITORY).strip()
    log, parts = tmp_path / "job.log", tmp_path / "out put.parts"

    wait_until(lambda: list(parts.glob("*.txt")) != [], PATIENCE_SECONDS, log.read_text)
    cluster.run("scancel", "--signal=USR1", job_id)
    wait_until(lambda: cluster.state(job_id) in OVER, PATIENCE_SECONDS, log.read_text)
    assert cluster.state(job_id) == "COMPLETED", log.read_text()
    assert "stopped while translating (signal SIGUSR1)" in log.read_text()
    assert "attempt 1: 2 ranks" in log.read_text()

    task = Task([model], DecodingConfig(beam_size=2), "torch")
    translate_file(task, source, tmp_path / "here", StopRequest())
    # Other batches of lines, by the moment of the stop: of two translations as likely as each other within rounding, the other
    # one may win. A part that was lost, doubled or out of place would be many lines.
    found, expected = (path.read_text(encoding="utf-8").split("\n") for path in (output, tmp_path / "here"))
    assert len(found) == len(expected) == len(LINES) + 1
    assert sum(one != other for one, other in zip(found, expected, strict=True)) <= 3
