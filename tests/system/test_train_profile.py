"""`train --profile` as a user runs it."""

import pytest
from running import records

STEPS = ("training.max_steps=20", "checkpoints.every_steps=100", "model.dropout=0.1")


@pytest.mark.slow
def test_a_profile_changes_no_bit_of_a_run_and_every_record_has_the_share_of_the_peak(command, train_small):
    plain = train_small("plain", *STEPS)
    said = command("train", "small.yaml", "run.name=profiled", *STEPS, "--profile")
    profiled = command.folder / "runs" / "profiled"
    folder = profiled / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["profile_rank0.md", "trace_rank0.json.gz"]
    assert not (plain / "profile").exists()
    table = (folder / "profile_rank0.md").read_text(encoding="utf-8")
    for part in ("data", "forward", "attention", "loss", "backward", "optimizer", "tracking"):
        assert f"\n{part} " in table
        assert f"profile    {part} " in said
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (plain, profiled)]
    assert weights[0] == weights[1]
    for run in (plain, profiled):
        assert [record["step"] for record in records(run)] == list(range(1, 21))
        assert all(0 < record["mfu"] < 2 for record in records(run))
    log = (plain / "train.log").read_text(encoding="utf-8")
    assert f"mfu {100 * records(plain)[-1]['mfu']:4.1f}%" in log
    assert "TFLOP/s a rank, measured; mfu is the share of it" in log
