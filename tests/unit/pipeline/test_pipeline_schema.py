"""The file of a pipeline: what it may say, and where each mistake is."""

import re
from pathlib import Path

import pytest

from dist_transformer.cli.main import Commands
from dist_transformer.errors import ConfigError
from dist_transformer.pipeline.schema import KINDS, PLACES, NodeKeys, read_pipeline

GOOD = """
root: runs/x
nodes:
  student: {kind: train, set: {data: {train: {source: text.en, target: {node: forward}}}}}
  forward: {kind: translate, model: {node: teacher}, input: text.en, beam: 4}
  teacher: {kind: train, set: {data: {train: {demo: train}}}}
  kept: {kind: filter, source: text.en, target: {node: forward}, scores: scores}
  fast: {kind: export, model: {node: teacher}}
  packed: {kind: export, model: {node: teacher}, to: argos}
"""
MISTAKES = {
    "translate, model: {node: teachr}": "nodes.forward.model: no node 'teachr'; did you mean `teacher`?",
    "translate, model: {node: teacher, output: text}": "nodes.forward.model: teacher has no such output; expected output: tok",
    "translate, model: {node: kept}": "nodes.forward.model: kept has no such output; expected output: source, output: target",
    "translate, model: {node: kept, output: source}": "nodes.forward.model: kept is a node of kind filter; expected one of",
    "translate, ensemble: [{node: fast}], model: x": "nodes.forward.ensemble.0: fast is a node of kind export; expected one of",
    "translate, engine: ctranslate2, model: {node: packed}": r"model: packed writes a model for another program .to: argos.",
    "translate, model: {node: fast}": "nodes.forward.model: fast writes a model for CTranslate2; set `engine: ctranslate2`",
    "translate, beem: 4, model: {node: teacher}": "nodes.forward.beem: no such key; did you mean `beam`?",
    "translate": "nodes.forward.model: is required but not given",
    "translate, model: [1]": r"nodes.forward.model: expected text; got \[1\]",
    "translate, model: x, seed: true": "nodes.forward.seed: expected a whole number; got true",
    "translator, model: x": "nodes.forward: expected a kind of prepare, train, translate, score,",
}


def problems_of(path: Path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_pipeline(path)
    return error.value.problems


def test_nodes_are_in_an_order_in_which_they_can_run(tmp_path):
    (tmp_path / "good.yaml").write_text(GOOD)
    pipeline = read_pipeline(tmp_path / "good.yaml", ["nodes.forward.beam=2", f"root={tmp_path}"])
    names = [*pipeline.nodes]
    assert names.index("teacher") < names.index("forward") < names.index("student")
    assert pipeline.nodes["forward"].reads == ("teacher",)
    assert pipeline.nodes["forward"].values["beam"] == 2
    assert pipeline.nodes["kept"].values["target"] == str(tmp_path / "forward" / "text")
    assert pipeline.section("nodes", "student", "set").values["data"]["train"]["target"] == f"{tmp_path}/forward/text"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_its_line(mistake, tmp_path):
    path = tmp_path / "bad.yaml"
    found = problems_of(path, GOOD.replace("translate, model: {node: teacher}", mistake))
    assert len(found) == 1
    assert re.search(MISTAKES[mistake], found[0])
    assert found[0].startswith(f"{path}:5: ")


def test_all_mistakes_are_told_at_once(tmp_path):
    text = GOOD.replace("kind: filter", "kind: filler").replace("beam: 4", "bean: 4").replace("root:", "rot:")
    found = problems_of(tmp_path / "bad.yaml", text.replace("rot:", "root: x\ndata_rot:"))
    assert [problem.split(":")[2].strip() for problem in found] == ["data_rot"]
    found = problems_of(tmp_path / "bad.yaml", text.replace("rot:", "root:"))
    assert [problem.split(":")[1] for problem in found] == ["5", "7"]


def test_the_sections_of_a_run_are_no_keys_of_a_pipeline_and_no_key_of_a_run_is_proposed(tmp_path):
    [problem] = problems_of(tmp_path / "bad.yaml", GOOD + "validation: {every_steps: 3}\n")
    assert problem.endswith("validation: no such key; known: root, data_root, set, nodes")


def test_an_exported_model_is_for_a_search_alone(tmp_path):
    scored = "  scored: {kind: score, model: {node: fast}, source: x, target: y}\n"
    [problem] = problems_of(tmp_path / "bad.yaml", GOOD + scored)
    assert "nodes.scored.model: fast writes a model that only translate and evaluate can read" in problem
    (tmp_path / "good.yaml").write_text(
        GOOD + scored.replace("score,", "evaluate, engine: ctranslate2, reference: z,").replace(", target: y", "")
    )
    assert read_pipeline(tmp_path / "good.yaml").nodes["scored"].reads == ("fast",)


def test_a_circle_is_named(tmp_path):
    text = GOOD.replace("{demo: train}", "{source: x, target: {node: forward}}")
    [problem] = problems_of(tmp_path / "bad.yaml", text)
    assert re.search(r":\d+: nodes read each other in a circle: (teacher <- forward|forward <- teacher)", problem)


@pytest.mark.parametrize("given", ["set.slurm=", "set.slurm=3", "nodes.teacher.set.slurm="])
def test_a_section_of_settings_is_a_mapping(given, tmp_path):
    (tmp_path / "good.yaml").write_text(GOOD)
    key, value = given.split("=")
    with pytest.raises(ConfigError, match=f"{key}: expected `key: value` lines below it; got {value or 'null'}"):
        read_pipeline(tmp_path / "good.yaml", [given])


@pytest.mark.parametrize("name", ["prepared", "a.b", "-a", "lock", '"a/b"', '"."'])
def test_a_name_that_is_no_folder_of_its_own_is_refused(name, tmp_path):
    [problem] = problems_of(tmp_path / "bad.yaml", f"root: x\nnodes:\n  {name}: {{kind: train}}\n")
    assert problem.startswith(f"{tmp_path}/bad.yaml:3: ")
    assert "expected a name of letters" in problem


def test_the_keys_of_a_node_are_options_of_its_verb():
    for kind in KINDS.keys() - {"filter"}:
        options = {parameter.name for parameter in Commands()[kind].params}
        flags = {flag.removeprefix("--").replace("-", "_") for each in Commands()[kind].params for flag in each.opts}
        known = options | flags | {*NodeKeys.model_fields, "config", "set", "model"}
        assert set(KINDS[kind].keys.model_fields) <= known, kind
        assert set(KINDS[kind].keys.model_fields) & flags - {"ranks", "processes"} or kind in ("train", "prepare")
    assert {key for kind in KINDS.values() for key in kind.keys.model_fields} >= set(PLACES)
