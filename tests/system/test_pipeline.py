"""A pipeline as a person runs it: killed, stopped, resumed, changed, and shown."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from running import Command, records

from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.files import read_json

pytestmark = pytest.mark.slow
TINY = Path(__file__).resolve().parents[2] / "configs" / "pipeline" / "tiny.yaml"
NODES = {
    *("corpus", "backward", "back_translation", "teacher", "forward", "agreement", "kept", "student", "student_alone"),
    *("int8", "teacher_scores", "student_scores", "student_alone_scores", "int8_scores"),
}
STEPS = 60
HELD_AT = 20
HOLDING = f"""
import importlib.machinery, os, sys, time
from pathlib import Path

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target) if name == "dist_transformer.training.loop" else None
        if spec is not None:
            run = spec.loader.exec_module

            def run_and_hold(module):
                run(module)
                step = module.Loop._step

                def held(loop, *others):
                    here = Path(os.environ["HELD"], loop._run.run_dir.name)
                    while loop.state.step >= {HELD_AT} and here.exists() and not loop._run.wants_stop():
                        time.sleep(0.01)
                    return step(loop, *others)

                module.Loop._step = held

            spec.loader.exec_module = run_and_hold
        return spec

sys.meta_path.insert(0, Finder)
"""
"""A sitecustomize.py: training waits at a step to be killed or stopped, as long as its name is in the folder HELD."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for split, count in (("train", 400), ("validation", 40), ("test", 30)):
        pairs = [pair for _, pair in zip(range(count), demo_pairs(split), strict=False)]
        for side, language in enumerate(("en", "de")):
            (folder / f"{split}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    (folder / "mono.de").write_bytes((folder / "train.de").read_bytes())
    return folder


def child_of(pid: int) -> int:
    """The verb that a pipeline runs now."""
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def wait_for_step(process: "subprocess.Popen[str]", run: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while not ((run / "metrics.jsonl").exists() and any(r["step"] >= step for r in records(run))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def states(command: Command, *place: object) -> dict[str, str]:
    lines = command("pipeline", "status", *place).splitlines()[2:]
    return {cells[1].strip(): cells[3].strip() for cells in (line.split("|") for line in lines)}


def test_a_pipeline_that_is_killed_and_stopped_ends_as_an_undisturbed_one(command: Command, text: Path, tmp_path: Path):
    root = tmp_path / "root"
    longer = [f"nodes.{name}.set.training.max_steps={STEPS}" for name in ("backward", "teacher")]
    place = (TINY, f"root={root}", f"data_root={text}", *longer)
    assert set(states(command, *place).values()) == {"to do"}
    held = tmp_path / "held"
    held.mkdir()
    (held / "sitecustomize.py").write_text(HOLDING, encoding="utf-8")
    path = os.pathsep.join([str(held), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name in ("backward", "teacher"):
        (held / name).touch()

    first = command.start("pipeline", "run", *place, PYTHONPATH=path, HELD=str(held))
    wait_for_step(first, root / "backward", STEPS // 4)
    verb = child_of(first.pid)
    os.kill(first.pid, signal.SIGSTOP)  # so that it starts nothing when its verb dies
    os.kill(verb, signal.SIGKILL)
    said = command("pipeline", "run", *place, code=2)
    assert "is run by one process at a time" in said
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    (held / "backward").unlink()
    assert states(command, *place)["corpus"] == "done"
    assert states(command, *place)["backward"] in ("running", "stopped")  # its last sign of life is fresh

    second = command.start("pipeline", "run", *place, PYTHONPATH=path, HELD=str(held))
    wait_for_step(second, root / "teacher", STEPS // 4)
    second.send_signal(signal.SIGTERM)
    _, err = second.communicate(timeout=240)
    assert second.returncode == 75, err
    assert "node teacher: ended with exit code 75; the same command resumes it" in err

    assert f"all {len(NODES)} nodes are done" in command("pipeline", "run", *place)
    assert read_json(root / "backward" / "run.json")["starts"] == 2
    assert read_json(root / "teacher" / "run.json")["starts"] == 2
    assert states(command, *place) == dict.fromkeys(NODES, "done")
    for name in ("backward", "teacher", "student"):
        alone = tmp_path / "undisturbed"
        command("train", root / name / "settings.yaml", f"run.root={alone}")
        ours, theirs = (folder / name / "model" / "model.safetensors" for folder in (root, alone))
        assert ours.read_bytes() == theirs.read_bytes(), name

    lines = len((text / "train.en").read_text(encoding="utf-8").splitlines())
    assert read_json(root / "kept" / "counts.json") == {"lines": lines, "kept_lines": lines - lines * 5 // 100}
    page = command("pipeline", "report", *place)
    scores = {line.split("|")[1].strip(): line for line in page.split("## Models")[0].splitlines() if "_scores" in line}
    assert scores.keys() == {name for name in NODES if name.endswith("_scores")}
    for name in scores:
        found = json.loads((root / name / "scores.json").read_text())
        assert f" {found['bleu']:.2f} " in scores[name]
        assert found["sentences_per_second"] > 0
        assert ("bleu.upper_case" in found) == (name != "student_alone_scores")
    assert "BLEU upper_case" in page
    assert (root / "int8" / "model" / "vmap.txt").is_file()
    [row] = [line for line in page.split("## Nodes")[0].splitlines() if line.startswith("| int8 ")]
    size = sum(path.stat().st_size for path in (root / "int8" / "model").iterdir())
    assert row.split("|")[-2].strip() == f"{size / 1e6:.2f}"

    changed = (*place, "nodes.kept.drop=0.5")
    again = {"kept", "student", "int8", "student_scores", "int8_scores"}
    assert {name for name, state in states(command, *changed).items() if state != "done"} == again
    assert states(command, *changed)["kept"] == "to do (changed: settings)"
    noted = {name: read_json(root / name / "node.json") for name in NODES}
    command("pipeline", "run", *changed)
    assert {name for name in NODES if read_json(root / name / "node.json") != noted[name]} == again
    assert {path.name for path in root.glob("*.1")} == {f"{name}.1" for name in again}
    assert states(command, *changed) == dict.fromkeys(NODES, "done")


def test_a_verb_that_fails_ends_the_pipeline_with_its_exit_code(quick_client: Path, tmp_path: Path):
    file = tmp_path / "small.yaml"
    file.write_text(
        "root: root\ndata_root: .\nnodes:\n  lines: {kind: filter, source: en, target: de, scores: scores, drop: 0.5}\n"
        "  worse: {kind: translate, model: en, input: {node: lines, output: source}}\n"
    )
    for name, content in (("en", "a\nb\n"), ("de", "c\nd\n"), ("scores", "-1\n-2\n")):
        (tmp_path / name).write_text(content)
    here = Command(tmp_path, quick_client)
    said = here("pipeline", "run", file, code=2)
    assert "dist-transformer: " in said
    assert "node worse: ended with exit code 2" in said
    assert states(here, file) == {"lines": "done", "worse": "failed (exit code 2)"}
    assert (tmp_path / "root" / "lines" / "source").read_text() == "a\n"


def test_mistakes_are_one_message_with_lines(command: Command, tmp_path: Path):
    file = tmp_path / "bad.yaml"
    file.write_text(
        "root: x\nnodes:\n  a: {kind: train, confg: x}\n  b: {kind: score, model: {node: c}, source: s, target: t}\n"
    )
    for verb in (("pipeline", "run"), ("pipeline", "status"), ("pipeline", "report"), ("submit", "--pipeline")):
        said = command(*verb, file, code=2)
        assert "Traceback" not in said
        assert f"{file}:3: nodes.a.confg: no such key; did you mean `config`?" in said
        assert f"{file}:4: nodes.b.model: no node 'c'; known: a, b" in said
    assert "no such file" in command("pipeline", "run", tmp_path / "none.yaml", code=2)
    assert "--pipeline FILE" in command("submit", code=2)
