"""S3 by a real server (moto) and the Hub by an endpoint that speaks its API, behind a proxy that fails on request: the
command prepares, streams, retries, ends with one message, and resumes to the same weights as from a disk."""

import io
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_server import quick_command
from faulty_proxy import Fault, Proxy
from hub_server import HubServer, hub_server
from running import NOT_INHERITED, Command, records, with_constants, without

from dist_transformer.data.manifest import Manifest
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.errors import EXIT_FAILED, EXIT_USER_ERROR
from dist_transformer.files import read_json

pytestmark = pytest.mark.slow
DATASET = "me/pairs"
SETTINGS = ("schedule.warmup_steps=2", "data.validation=null", "data.on_the_fly=true")


@pytest.fixture(scope="module")
def s3() -> Iterator[Proxy]:
    if not os.environ.get("DIST_TRANSFORMER_REQUIRE_SERVICES"):
        pytest.importorskip("s3fs")
        pytest.importorskip("moto")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with Proxy(server.get_host_and_port()[1]) as proxy:
        yield proxy
    server.stop()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 pairs in two parquet files, named as on the Hub."""
    folder = tmp_path_factory.mktemp("dataset")
    (folder / "data").mkdir()
    pairs = list(islice(demo_pairs("train"), 600))
    for number in range(2):
        part = pairs[300 * number : 300 * (number + 1)]
        table = pa.table({"en": [source for source, _ in part], "de": [target for _, target in part]})
        pq.write_table(table, folder / f"data/train-{number:05}-of-00002.parquet", row_group_size=64)
    return folder


@pytest.fixture(scope="module")
def repository(dataset: Path) -> Iterator[HubServer]:
    with hub_server(dataset, DATASET) as server:
        yield server


@pytest.fixture(scope="module")
def hub(repository: HubServer) -> Iterator[Proxy]:
    with Proxy(repository.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def command(small_corpus: Path, s3: Proxy, hub: Proxy, dataset: Path, tmp_path_factory) -> Iterator[Command]:
    """The command in an environment that leads to both servers; what their clients retry by themselves is little."""
    folder = tmp_path_factory.mktemp("quick_remote")
    environment = {
        **without(NOT_INHERITED),
        "AWS_ENDPOINT_URL": s3.uri,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "HF_ENDPOINT": hub.uri,
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "0",
        **with_constants({"data.sources.retries.READ_ATTEMPTS": 3}),
    }
    fill_bucket(s3, small_corpus, dataset)
    with quick_command(folder, environment):
        given = folder / "with_environment"
        client = (folder / "dist-transformer").read_text(encoding="utf-8")
        given.write_text(client.replace("dict(os.environ)", f"{json.dumps(environment)}"), encoding="utf-8")
        given.chmod(0o755)
        yield Command(small_corpus, given)


def fill_bucket(s3: Proxy, text: Path, dataset: Path) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=s3.uri, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
    )
    client.create_bucket(Bucket="texts")
    for file in [*text.glob("*.en"), *text.glob("*.de"), *dataset.glob("data/*")]:
        client.upload_fileobj(io.BytesIO(file.read_bytes()), "texts", file.name)


def on(train: str) -> str:
    return f"data.train={{source: null, target: null, {train}}}"


PLACES = {
    "disk": lambda dataset: on(f"path: '{dataset}/data/train-*.parquet'"),
    "S3": lambda dataset: on("path: 's3://texts/train-*.parquet'"),
    "Hub": lambda dataset: on(f"hub: {DATASET}, split: train"),
}


@pytest.fixture(scope="module")
def streamed(command: Command, dataset: Path) -> Path:
    """Six steps in one go, with the text tokenized on the fly from the disk."""
    command("train", "small.yaml", "run.name=from_disk", PLACES["disk"](dataset), *SETTINGS)
    return command.folder / "runs/from_disk"


@pytest.fixture
def servers(s3: Proxy, hub: Proxy) -> Iterator[dict[str, Proxy]]:
    yield {"S3": s3, "Hub": hub}
    s3.set_fault(None)
    hub.set_fault(None)


def assert_one_message(said: str, pattern: str) -> None:
    assert "Traceback" not in said
    (message,) = [line for line in said.splitlines() if line.startswith("dist-transformer: ")]
    assert re.search(pattern, message), message


def assert_as(run: Path, other: Path) -> None:
    """The same batches, and the same weights and moments to the bit."""
    digests = [[(record["step"], record["batch_digest"]) for record in records(each)] for each in (run, other)]
    assert digests[0] == digests[1]
    state = "checkpoints/step_00000006/state_0.safetensors"
    assert (run / state).read_bytes() == (other / state).read_bytes()


def test_text_on_s3_is_prepared_as_that_of_a_disk_through_errors_and_broken_connections(
    command: Command, servers, tmp_path
):
    from_disk, from_s3 = tmp_path / "disk", tmp_path / "s3"
    command("prepare", "small.yaml", f"data.prepared={from_disk}")
    remote = ("prepare", "small.yaml", "data.root=s3://texts", f"data.prepared={from_s3}")
    servers["S3"].set_fault(Fault(only="train.de", status=500))
    assert_one_message(command(*remote, code=EXIT_FAILED), r"s3://texts/train\.de: cannot be read")
    servers["S3"].set_fault(Fault(status=403))
    assert_one_message(command(*remote, code=EXIT_USER_ERROR), r"s3://texts/\S*: cannot be read: PermissionError")
    servers["S3"].set_fault(Fault(is_cut=True, is_rank_zero=True))
    command(*remote)
    assert servers["S3"].met >= 4  # each file, of training and validation
    for name in ("manifest.json", *(f"shards/{path.name}" for path in (from_disk / "shards").iterdir())):
        assert (from_s3 / name).read_bytes() == (from_disk / name).read_bytes()


def test_what_is_not_on_s3_is_named(command: Command, servers, tmp_path):
    for path, message in (
        ("s3://texts/none.parquet", r"s3://texts/none\.parquet: no such file\. Check the address"),
        ("s3://none/train.parquet", r"s3://none/train\.parquet: no such file\. Check the address"),
        ("s3://texts/none-*.parquet", "no file fits this pattern"),
    ):
        settings = (on(f"path: '{path}'"), f"data.prepared={tmp_path / 'prepared'}", "data.validation=null")
        assert_one_message(command("prepare", "small.yaml", *settings, code=EXIT_USER_ERROR), message)


@pytest.mark.parametrize("place", ["S3", "Hub"])
def test_a_run_streams_through_errors_ends_with_one_message_in_an_outage_and_resumes(
    command: Command, dataset, streamed, servers, place, tmp_path
):
    server: Proxy = servers[place]
    own = f"data.prepared={tmp_path / 'prepared'}"  # not that of the same text on the disk
    train = ("train", "small.yaml", f"run.name=from_{place}", PLACES[place](dataset), *SETTINGS, own)
    server.set_fault(Fault(only="parquet", is_cut=True, is_rank_zero=True))
    command(*train, "training.max_steps=3")
    assert server.met >= 2
    server.set_fault(Fault(only="parquet", status=500))
    said = command(*train, code=EXIT_FAILED)
    assert server.met
    assert_one_message(said, r"train-.*parquet.* cannot be read")
    server.set_fault(Fault(only="parquet", status=500, is_rank_zero=True))
    assert "start      step 3, resumed from" in command(*train)
    assert server.met
    assert_as(command.folder / f"runs/from_{place}", streamed)


def test_the_hub_is_asked_again_when_it_is_busy_and_an_unknown_dataset_is_named(command: Command, servers, tmp_path):
    def prepare(name: str, code: int = 0) -> str:
        settings = (on(f"hub: {name}, split: train"), f"data.prepared={tmp_path / name}", "data.validation=null")
        return command("prepare", "small.yaml", *settings, code=code)

    servers["Hub"].set_fault(Fault(only="/api/datasets/me/pairs", status=500, is_rank_zero=True))
    prepare(DATASET)
    assert servers["Hub"].met
    servers["Hub"].set_fault(None)
    assert_one_message(
        prepare("me/none", EXIT_USER_ERROR), r"me/none \(.*train\): cannot be read: DatasetNotFoundError"
    )


STOPPED = """
from dist_transformer.cli.main import main
from dist_transformer.data.prepare.chunks import Units

def stop(units):
    raise SystemExit(9)

Units.make_chunks = stop
main()
"""
WAITS = """
import time
from pathlib import Path
from dist_transformer.cli.main import main
from dist_transformer.data.prepare.duplicates import Comparison

def wait(comparison, mark=Comparison.mark):
    Path("between").touch()
    while Path("between").exists():
        time.sleep(0.05)
    mark(comparison)

Comparison.mark = wait
main()
"""


@pytest.fixture
def half(repository: HubServer, dataset: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder for the next commit, with the first of the two files; the dataset is put back afterwards."""
    (tmp_path / "next/data").mkdir(parents=True)
    shutil.copy(next(dataset.glob("data/train-00000*")), tmp_path / "next/data")
    yield tmp_path / "next"
    del repository.commits[1:]


def test_a_dataset_that_moves_while_it_is_prepared_is_read_to_the_end_as_it_was_at_the_start(
    command: Command, repository: HubServer, half, tmp_path
):
    settings = (PLACES["Hub"](None), f"data.prepared={tmp_path}/prepared", "data.validation=null")
    program, began_at = tmp_path / "stopped.py", repository.commit()
    program.write_text(STOPPED, encoding="utf-8")
    code, said = command.program(program, "prepare", "small.yaml", *settings)
    assert code == 9, said
    repository.push(half)
    command("prepare", "small.yaml", *settings)
    manifest = Manifest.load(tmp_path / "prepared")
    assert manifest.commits == {f"{DATASET}@None": began_at} != {f"{DATASET}@None": repository.commit()}
    assert manifest.splits["train"].read_rows == 600


def test_both_passes_of_data_clean_read_one_commit(command: Command, repository: HubServer, half, tmp_path):
    program, between = tmp_path / "waits.py", command.folder / "between"
    program.write_text(WAITS, encoding="utf-8")
    settings = (PLACES["Hub"](None), "data.validation=null", "data.filters.rules={duplicates: true}")
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(command.program, program, "data", "clean", "small.yaml", tmp_path / "clean", *settings)
        while not between.exists() and not ended.done():
            time.sleep(0.05)
        repository.push(half)
        between.unlink(missing_ok=True)
        code, said = ended.result()
    assert code == 0, said
    assert read_json(tmp_path / "clean/clean.json")["corpora"]["train"]["pairs"] == 600


def test_a_validation_text_is_kept_of_the_commit_that_was_prepared(
    command: Command, repository: HubServer, half, tmp_path
):
    more = ("data.validation=null", f"data.more_validation={{more: {{hub: {DATASET}, split: train}}}}")
    settings = (
        *more,
        PLACES["Hub"](None),
        "data.filters.rules={held_out: false}",
        f"data.prepared={tmp_path}/prepared",
    )
    command("prepare", "small.yaml", *settings)
    shutil.rmtree(tmp_path / "prepared/validation_text")
    repository.push(half)
    command("prepare", "small.yaml", *settings)
    [copy] = (tmp_path / "prepared/validation_text").iterdir()
    last = pq.read_table(next(repository.commits[0].glob("data/train-00001*")))["en"][-1].as_py()
    assert last in read_json(copy)["source"]
