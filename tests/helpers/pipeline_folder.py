"""A folder with a pipeline whose nodes are made as their verbs would make them."""

from pathlib import Path

from dist_transformer.files import write_json
from dist_transformer.pipeline.run import begin, set_aside
from dist_transformer.pipeline.schema import KINDS, Pipeline, read_pipeline
from dist_transformer.pipeline.state import State, complete, states_of

FILE = """
root: {root}
data_root: {folder}
nodes:
  teacher: {{kind: train, config: base.yaml}}
  forward: {{kind: translate, model: {{node: teacher}}, input: mono}}
  kept: {{kind: filter, source: mono, target: {{node: forward}}, scores: scores, drop: 0.1}}
  other: {{kind: translate, model: made, input: mono}}
"""
CONFIG = "data: {train: {source: train.en, target: train.de}}\ntraining: {max_steps: 5}\nschedule: {warmup_steps: 2}\n"


def pipeline_in(folder: Path, *overrides: str) -> Pipeline:
    return read_pipeline(folder / "pipeline.yaml", [*overrides])


def make(pipeline: Pipeline, name: str, state: State, *, is_whole: bool = True) -> None:
    """Writes the files that a verb leaves behind."""
    begin(pipeline, name, state)
    folder = pipeline.folder(name)
    for made in KINDS[pipeline.nodes[name].kind].made if is_whole else ():
        place = folder / made / "model.safetensors" if made == "model" else folder / made
        place.parent.mkdir(exist_ok=True)
        place.write_text(f"{name} {made}")
    if pipeline.nodes[name].kind == "train":
        write_json(folder / "run.json", {"state": "finished" if is_whole else "stopped", "step": 5})
    if is_whole:
        complete(pipeline, name)


def make_all(pipeline: Pipeline) -> None:
    states = states_of(pipeline)
    set_aside(pipeline, states)
    for name, state in states.items():
        if state.is_due:
            make(pipeline, name, state)


def due(pipeline: Pipeline) -> dict[str, str]:
    return {name: state.why for name, state in states_of(pipeline).items() if state.is_due}
