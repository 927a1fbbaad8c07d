"""demo | demo-corpus: all steps on the embedded corpus, and that corpus as text files."""

import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.config.yaml_positions import read_yaml
from dist_transformer.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError, DistTransformerError
from dist_transformer.package_data import share_folder
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records
from dist_transformer.run.outputs import check_output, holds_only, write_output

STOP_AT_STEP = 100
SENTENCES = (
    "The train leaves at half past seven on Monday.",
    "The meeting takes place on the twenty-first of March.",
    "The book costs four euros and fifty cents.",
)


def demo_command(
    root: Annotated[Path, typer.Option(help="Folder of runs; the demo's own run in it is made anew.")] = Path("runs"),
    ranks: Annotated[int, typer.Option(min=1, max=2, help="Ranks to train on.")] = 2,
) -> None:
    """Train on the embedded corpus, stop and resume on the way, score on held-out pairs, translate three sentences."""
    run_dir = RunDir(root / "demo-tour")
    check_output(run_dir.path, "a run of the demo", _is_demo_run)
    remove_former_run(run_dir)
    config = share_folder("configs") / "demo.yaml"
    train = _command("train", config, f"run.root={root}", "run.name=demo-tour", "--ranks", ranks)
    _say(f"1/4 Training on {ranks} ranks; it will be stopped after step {STOP_AT_STEP}.")
    process = subprocess.Popen(train)
    while process.poll() is None and max((r["step"] for r in read_records(run_dir.metrics)), default=0) < STOP_AT_STEP:
        time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    _expect(process.wait(), EXIT_REQUEUE, train)
    _say(f"Stopped with exit code {EXIT_REQUEUE}: saved, start again. 2/4 The same command resumes where it stopped.")
    _expect(subprocess.run(train, check=False).returncode, EXIT_DONE, train)
    _say("3/4 Scoring on 1,000 held-out pairs.")
    evaluate = _command("evaluate", run_dir.path)
    _expect(subprocess.run(evaluate, check=False).returncode, EXIT_DONE, evaluate)
    _say("4/4 Translating.")
    translate = _command("translate", run_dir.path)
    lines = subprocess.run(translate, input="\n".join(SENTENCES), check=False, text=True, stdout=subprocess.PIPE)
    _expect(lines.returncode, EXIT_DONE, translate)
    for source, target in zip(SENTENCES, lines.stdout.removesuffix("\n").split("\n"), strict=True):
        print(f"  {source}\n    -> {target}")
    _say(
        f"Run folder: {run_dir.path}. Its MLflow run is in {root / 'mlflow.db'}; look at it with `make ui` or\n"
        f"  dist-transformer ui {shlex.quote(str(root))}"
    )


def demo_corpus_command(folder: Annotated[Path, typer.Argument(help="Where to write train.en, train.de, ...")]) -> None:
    """Write the embedded English-German corpus as aligned text files."""
    from dist_transformer.data.sources.demo_corpus import demo_pairs

    corpora = {split: [*demo_pairs(split)] for split in ("train", "validation", "test")}
    texts = {
        folder / f"{split}.{language}": "".join(f"{pair[side]}\n" for pair in pairs)
        for split, pairs in corpora.items()
        for side, language in enumerate(("en", "de"))
    }
    for path in texts:
        check_output(path, "the same text", lambda path: path.read_bytes() == texts[path].encode(), is_file=True)
    for path, text in texts.items():
        write_output(path, text)
    for split, pairs in corpora.items():
        print(f"{folder / split}.{{en,de}}: {len(pairs)} pairs")


def remove_former_run(run_dir: RunDir) -> None:
    """Removes what a run writes into its folder, and leaves whatever else is there."""
    for path in run_dir.of_run():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _is_demo_run(folder: Path) -> bool:
    """True if the demo made the run, or was ended before the run had written its settings."""
    run_dir = RunDir(folder)
    if not run_dir.config.exists():
        return holds_only(folder, (run_dir.lock, run_dir.owner, run_dir.log, run_dir.state, run_dir.history))
    try:
        settings = read_yaml(run_dir.config).values
        return bool(settings["run"]["name"] == run_dir.name and settings["data"]["train"]["demo"])
    except (ConfigError, KeyError, TypeError):
        return False


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "dist_transformer", *map(str, arguments)]


def _expect(code: int, expected: int, command: list[str]) -> None:
    if code != expected:
        raise DistTransformerError(f"{' '.join(command)} ended with exit code {code}, expected {expected}")


def _say(text: str) -> None:
    width = min(shutil.get_terminal_size().columns, 100)
    print(f"\n{'=' * width}\n{text}\n{'=' * width}", flush=True)
