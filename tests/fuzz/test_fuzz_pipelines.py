"""Any value at any place of a pipeline: read and shown, or refused with a message; never a traceback."""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.errors import DistTransformerError
from dist_transformer.pipeline.results import report
from dist_transformer.pipeline.schema import read_pipeline
from dist_transformer.pipeline.state import states_of

pytestmark = pytest.mark.slow
PIPELINE: dict[str, Any] = {
    "root": "root",
    "data_root": "text",
    "set": {
        "data": {"train": {"source": "a", "target": "b"}},
        "training": {"max_steps": 5},
        "schedule": {"warmup_steps": 2},
        "slurm": {"nodes": 2},
    },
    "nodes": {
        "corpus": {"kind": "prepare"},
        "teacher": {"kind": "train", "set": {"data": {"prepared": {"node": "corpus"}}}},
        "text": {"kind": "translate", "model": {"node": "teacher"}, "input": "a", "ensemble": ["m"], "beam": 4},
        "scores": {"kind": "score", "model": {"node": "teacher"}, "source": "a", "target": {"node": "text"}},
        "kept": {
            "kind": "filter",
            "source": "a",
            "target": {"node": "text"},
            "scores": {"node": "scores"},
            "drop": 0.1,
        },
        "fast": {"kind": "export", "model": {"node": "teacher"}, "to": "ctranslate2"},
        "bleu": {"kind": "evaluate", "model": {"node": "fast"}, "source": "a", "reference": "b"},
    },
}
ODD = [
    *(None, True, 0, -1, 1.5, 10**400, "", "x", "/", ".", "..", "é", "x" * 300, "a\nb", [], {}, {"a": {"b": 1}}),
    *({"node": "teacher"}, {"node": None}, {"node": ["x"]}, {"node": "text", "output": 3}, [{"node": "teacher"}]),
]
KEYS = ["zz", "kind", "node", "", "a.b", "1", "config", "slurm", "set", "root"]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0):
        yield from places(value[key], (*path, key))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "text" / "m").mkdir(parents=True)
    for name in ("a", "b", "m/model.bin"):
        (folder / "text" / name).write_text("x\ny\n")
    return folder


@given(st.data())
def test_an_odd_value_at_any_place_ends_in_a_message(folder: Path, data: st.DataObject) -> None:
    values = copy.deepcopy(PIPELINE)
    for _ in range(data.draw(st.integers(0, 2))):
        *above, key = data.draw(st.sampled_from([path for path in places(values) if path]))
        holder: Any = values
        for part in above:
            holder = holder[part]
        if isinstance(holder, dict) and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(KEYS))
        holder[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
    file = folder / "pipeline.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")  # which is YAML
    with suppress(DistTransformerError):
        try:
            pipeline = read_pipeline(file, [f"data_root={folder}/text"] if values.get("data_root") == "text" else [])
            assert "## Nodes" in "\n".join(report(pipeline, states_of(pipeline)))
        except OSError as error:
            if not error.filename:  # else the command turns it into a message
                raise
