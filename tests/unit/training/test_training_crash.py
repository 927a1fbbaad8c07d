"""A crash leaves what is needed to do it again on one rank, and `train RUN --replay-crash` does it."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from plain_torch import TINY, VOCABULARY
from safetensors.torch import load_file
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import Config
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.data.loader.window import BatchShape
from dist_transformer.data.manifest import Manifest
from dist_transformer.errors import UserError
from dist_transformer.files import read_json
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.folder import RunDir
from dist_transformer.training import replay
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.tensor_files import Weights
from dist_transformer.training.crash import read_crash, write_crash
from dist_transformer.training.global_batch import GlobalBatch
from dist_transformer.training.run_data import open_run_data
from dist_transformer.training.train_state import TrainState, dropout_seed

CONFIG = Config.model_validate({"data": {"train": {"demo": "train"}}, "run": {"seed": 11}})


def micro_batch(lane: int, rows: int = 3) -> MicroBatch:
    """Views of one memory, as the loader hands them out, one of them across it."""
    tokens = torch.randint(4, VOCABULARY, (rows * 12,), generator=torch.Generator().manual_seed(lane))
    source, target = tokens[: rows * 5].view(5, rows).t(), tokens[rows * 5 :].view(rows, 7)
    shape = BatchShape(rows, 5, 7, rows, rows * 5, rows * 7)
    target_in = torch.cat([torch.ones(rows, 1, dtype=torch.int64), target[:, :-1]], dim=1)
    return MicroBatch(lane, shape, source, target_in, target, torch.arange(rows) + 100 * lane)


def global_batch(micro_batches: list[MicroBatch | None]) -> GlobalBatch:
    tokens = 2 * sum(mb.shape.target_tokens for mb in micro_batches if mb is not None)
    return GlobalBatch(
        micro_batches=micro_batches, partition=None, lane_positions={}, target_tokens=tokens, source_tokens=tokens,
        pairs=3, padded_tokens=99, straggler_ratio=1.0, pairs_by_corpus=Counter(), dropped=Counter(), quarantined=(),
        stop=False, is_writing=False, loss_sum=0.0, digest="abc", wait_seconds=0.0,
    )  # fmt: skip


def failure(text: str = "index out of range", kind: type[Exception] = IndexError) -> Exception:
    try:
        raise kind(text)
    except kind as error:
        return error


PROGRESS = TrainState(position=None, step=8, batches=9)
BATCH = global_batch([micro_batch(1), None, micro_batch(5)])


def test_a_crash_tells_exception_place_rows_and_versions(tmp_path, ranks):
    path = write_crash(RunDir(tmp_path), ranks, failure(), CONFIG, PROGRESS, BATCH)
    assert path == tmp_path / "crash" / "rank_00000"
    assert sorted(file.name for file in path.iterdir()) == ["batch.safetensors", "config.yaml", "crash.json"]
    told = read_json(path / "crash.json")
    assert (told["exception"], told["text"], told["step"], told["batches"]) == (
        "IndexError",
        "index out of range",
        9,
        9,
    )
    assert "raise kind(text)" in told["traceback"]
    assert (told["rank"], told["num_ranks"], told["follows_another"]) == (0, 1, None)
    assert {lane: mb["row_ids"] for lane, mb in told["micro_batches"].items()} == {
        "1": [100, 101, 102], "5": [500, 501, 502],
    }  # fmt: skip
    assert told["versions"]["torch"] == torch.__version__
    assert set(told["versions"]) == {"dist_transformer", "python", "torch", "deepspeed"}
    assert load_config(path / "config.yaml", check_files=False) == CONFIG


def test_the_micro_batches_of_a_crash_are_read_back_as_they_were(tmp_path, ranks):
    write_crash(RunDir(tmp_path), ranks, failure(), CONFIG, PROGRESS, BATCH)
    crash = read_crash(RunDir(tmp_path), None)
    assert crash.lanes == [1, 5]
    for mb in (BATCH.micro_batches[0], BATCH.micro_batches[2]):
        source, target_in, target_out = crash.sides(mb.lane)
        assert torch.equal(source, mb.source_BS)
        assert torch.equal(target_in, mb.target_in_BT)
        assert torch.equal(target_out, mb.target_out_BT)
        assert crash.pairs_and_tokens(mb.lane) == (3, 21)
    assert crash.config(["training.precision=fp32"]).training.precision == "fp32"


def test_a_crash_before_the_first_batch_is_written_too(tmp_path, ranks):
    path = write_crash(RunDir(tmp_path), ranks, failure(kind=MemoryError), CONFIG, None, None)
    assert path is not None
    assert read_json(path / "crash.json")["step"] is None
    assert load_file(path / "batch.safetensors") == {}


def test_an_older_crash_of_the_same_rank_is_replaced_whole(tmp_path, ranks):
    write_crash(RunDir(tmp_path), ranks, failure("first"), CONFIG, PROGRESS, BATCH)
    write_crash(RunDir(tmp_path), ranks, failure("second"), CONFIG, PROGRESS, global_batch([micro_batch(2)]))
    crash = read_crash(RunDir(tmp_path), 0)
    assert (crash.values["text"], crash.lanes) == ("second", [2])
    assert [path.name for path in (tmp_path / "crash").iterdir()] == ["rank_00000"]


def test_what_cannot_be_written_is_only_logged_and_leaves_the_older_one(tmp_path, ranks, monkeypatch, caplog):
    write_crash(RunDir(tmp_path), ranks, failure("first"), CONFIG, PROGRESS, BATCH)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dist_transformer.training.crash.save_file", full)
    assert write_crash(RunDir(tmp_path), ranks, failure("second"), CONFIG, PROGRESS, BATCH) is None
    assert "rank 0 could not write" in caplog.text
    assert "No space left on device" in caplog.text
    assert read_crash(RunDir(tmp_path), 0).values["text"] == "first"
    assert [path.name for path in (tmp_path / "crash").iterdir()] == ["rank_00000"]


def as_rank(run_dir: RunDir, rank: int, **values: object) -> None:
    """Makes the record of rank 0 that of another rank."""
    folder = run_dir.crash / f"rank_{rank:05d}"
    (run_dir.crash / "rank_00000").rename(folder)
    told = read_json(folder / "crash.json")
    (folder / "crash.json").write_text(json.dumps({**told, "rank": rank, **values}), encoding="utf-8")


def test_without_a_rank_the_one_that_failed_by_itself_and_last_is_taken(tmp_path, ranks):
    run_dir = RunDir(tmp_path)
    lost = failure("[pair.cc:537] Read error [127.0.0.1]:39327: Connection reset by peer", RuntimeError)
    for rank, error, time in ((2, failure("old"), 1.0), (3, failure("new"), 2.0), (4, lost, 3.0)):
        write_crash(run_dir, ranks, error, CONFIG, PROGRESS, BATCH)
        as_rank(run_dir, rank, time=time)
    assert read_crash(run_dir, None).values["text"] == "new"
    assert read_crash(run_dir, 4).values["follows_another"].startswith("another rank has left")
    with pytest.raises(UserError, match=r"rank 7 left no record of a crash; there are those of ranks 2, 3, 4$"):
        read_crash(run_dir, 7)
    write_crash(run_dir, ranks, lost, CONFIG, PROGRESS, BATCH)
    as_rank(run_dir, 5, start=1)  # of a later start, whose first rank to fail could write nothing
    assert read_crash(run_dir, None).values["rank"] == 5


def test_a_run_that_never_crashed_has_nothing_to_replay(tmp_path):
    with pytest.raises(
        UserError, match=r"nothing to replay: no rank of this run left a record of a crash: a stop, or an error"
    ):
        read_crash(RunDir(tmp_path), None)


@pytest.mark.parametrize("option", [["--replay-crash"], ["--crash-rank", "0"]])
def test_a_crash_is_that_of_a_run_folder_and_not_of_a_yaml_file(tmp_path, option):
    """The file's own run name is another than the override says, or may become one."""
    (tmp_path / "run.yaml").write_text("run: {name: other}\ndata: {train: {demo: train}}\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), "run.name=mine", *option])
    assert isinstance(result.exception, UserError)
    assert "run.yaml: expected a run folder" in str(result.exception)


@pytest.mark.parametrize("name", ["crash.json", "batch.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]"])
def test_a_damaged_record_of_a_crash_is_named(tmp_path, ranks, name, content):
    path = write_crash(RunDir(tmp_path), ranks, failure(), CONFIG, PROGRESS, BATCH)
    (path / name).unlink() if content is None else (path / name).write_bytes(content)
    with pytest.raises(UserError, match="rank_00000: cannot be read as the record of a crash"):
        read_crash(RunDir(tmp_path), None)


# ------------------------------------------------------------------------------------------------ doing it again


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_lane_whose_gradient_is_not_finite_is_named_and_moves_nothing(tmp_path, ranks, make_engine, capsys, stage):
    write_crash(RunDir(tmp_path), ranks, failure(), CONFIG, PROGRESS, BATCH)
    crash, engine = read_crash(RunDir(tmp_path), None), make_engine(zero_stage=stage)
    before = [fragment.values.clone() for fragment in engine.fragments() if fragment.part == "weight"]
    replay._replay_lane(engine, crash, 1, 11, ranks.device)
    after = [fragment.values for fragment in engine.fragments() if fragment.part == "weight"]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert capsys.readouterr().out.rstrip().endswith(" finite")
    engine.load(lambda part, name, start, stop: torch.full((stop - start,), float("nan")), 0)
    replay._replay_lane(engine, crash, 5, 11, ranks.device)
    assert capsys.readouterr().out.rstrip().endswith(" NOT FINITE")


@pytest.mark.parametrize("lane", [1, 5])
def test_a_replayed_lane_has_the_dropout_that_it_had(tmp_path, ranks, make_engine, capsys, lane):
    write_crash(RunDir(tmp_path), ranks, failure(), CONFIG, PROGRESS, BATCH)
    engine = make_engine(dropout=0.3)
    replay._replay_lane(engine, read_crash(RunDir(tmp_path), None), lane, 11, ranks.device)
    torch.manual_seed(0)  # as in make_engine
    model = Transformer(TINY.model_copy(update={"dropout": 0.3}), VOCABULARY, VOCABULARY, 0)
    torch.manual_seed(dropout_seed(11, PROGRESS.batches, lane))
    mb = micro_batch(lane)
    loss, _ = model.loss(mb.source_BS, mb.target_in_BT, mb.target_out_BT, 0.1)
    loss.backward()
    norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters()) / BATCH.target_tokens
    said = capsys.readouterr().out
    assert f"loss {float(loss.detach()) / mb.shape.target_tokens:.4f} a token" in said
    assert float(said.split("gradient norm ")[1].split()[0]) == pytest.approx(float(norm), rel=1e-3)


def files_of(run: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(run.rglob("*"))}


@pytest.mark.slow
def test_replay_crash_runs_the_rows_again_and_touches_nothing(train_small, command, ranks):
    run = train_small("replayed", "model.dropout=0.0")
    config = load_config(run / "config.yaml", check_files=False)
    manifest = Manifest.load(Path(config.data.prepared))
    data = open_run_data(config, Path(config.data.prepared), manifest)
    mine = data.loader(data.start(), 0, 1, 2, 0).next_step().batches  # as rank 1 of 2
    progress = TrainState(data.start(), step=4, batches=4)
    write_crash(RunDir(run), ranks, failure(), config, progress, global_batch(mine))
    before = files_of(run)

    said = command("train", run, "--replay-crash")
    assert "IndexError at step 5: index out of range" in said
    assert "step_00000003, 1 updates before those that crashed" in said
    weights = dict(Weights(checkpoints.saved(RunDir(run))[0]))
    model = Transformer(config.model, manifest.source_vocabulary, manifest.target_vocabulary, manifest.pad_id)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        for mb in mine:
            loss, _ = model.loss(mb.source_BS, mb.target_in_BT, mb.target_out_BT, config.training.label_smoothing)
            expected = f"{len(mb.row_ids)} pairs  loss {float(loss) / mb.shape.target_tokens:.4f} a token"
            assert any(line.startswith(f"lane {mb.lane:4d}") and expected in line for line in said.splitlines())
    assert said.count("NOT FINITE") == 0
    assert "did not crash again" in said
    assert files_of(run) == before

    wrong = mine[1].source_BS.clone()
    wrong[0, 0] = manifest.source_vocabulary + 10**6
    mine[1] = MicroBatch(
        mine[1].lane, mine[1].shape, wrong, mine[1].target_in_BT, mine[1].target_out_BT, mine[1].row_ids
    )
    write_crash(RunDir(run), ranks, failure("second"), config, progress, global_batch(mine))
    before = files_of(run)
    said = command("train", run, "--crash-rank", 0, code=1)
    assert "crashed again: IndexError" in said
    assert files_of(run) == before

    config_text = yaml.safe_load((run / "crash" / "rank_00000" / "config.yaml").read_text(encoding="utf-8"))
    assert config_text["model"]["dropout"] == 0.0
    said = command("train", run, "--replay-crash", "--crash-rank", 3, code=2)
    assert "rank 3 left no record of a crash; there are those of ranks 0" in said
