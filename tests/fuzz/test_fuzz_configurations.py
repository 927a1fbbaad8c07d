"""Any YAML and any override: checked, shown and planned, or refused with a message; never a traceback."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from forked_command import ODD_WORDS, bounded, must_end_in_a_message
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dist_transformer.config.schema import Config

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
DEMO = CONFIGS / "demo.yaml"


def keys_of(section: Any, above: str = "") -> Iterator[str]:
    """Every key of a section, and of the sections in it."""
    for name, field in section.model_fields.items():
        yield f"{above}{name}"
        for kind in [field.annotation, *get_args(field.annotation)]:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys_of(kind, f"{above}{name}.")


KEYS = [
    *keys_of(Config),
    "extends",
    "a.b.c",
    "data.mixture.weights.a",
    "slurm.environment.A",
    "data.validation_corpora.a.source",
]
EXTREMES = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "1000000",
    "2147483647",
    "9223372036854775807",
    "1e-300",
    "1e300",
    "0.5",
    "0.999999999",
]
EXTREMES += ["none", "auto", "[]", "{}", "bounded", "fp32", "true", "00:01", "1-0", "x", "[x]", "{x: 1}", "/nowhere"]
ODD_TEXTS = st.sampled_from(ODD_WORDS)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([2**31, 2**63, 2**64, 10**30, 10**400, -1, 0, 1, 2]),
    st.floats(), st.sampled_from([1e308, 5e-324, -0.0]), ODD_TEXTS, st.text(max_size=8),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXTS | st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    """An empty working folder, for paths that lead nowhere."""
    folder, before = tmp_path_factory.mktemp("fuzz"), Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def read_everywhere(*arguments: str) -> None:
    """Every verb that only reads a configuration."""
    must_end_in_a_message("config", "check", *arguments)
    must_end_in_a_message("config", "show", *arguments)
    must_end_in_a_message("plan", *arguments, "--nodes", "1,3", "--json")


@bounded(30)
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(EXTREMES)), min_size=1, max_size=4))
def test_any_setting_at_its_extremes_is_taken_or_refused_with_a_message(folder, overrides):
    arguments = (str(DEMO), *(f"{key}={value}" for key, value in overrides))
    read_everywhere(*arguments)
    must_end_in_a_message("simulate", *arguments, "--nodes", "1,3", "--json")


@bounded(20)
@given(st.sampled_from(SHIPPED), st.lists(st.tuples(st.sampled_from(KEYS), ODD_TEXTS | VALUES.map(str)), max_size=3))
def test_any_override_is_taken_or_refused_with_a_message(folder, path, overrides):
    read_everywhere(str(path), *(f"{key}={value}" for key, value in overrides))


@bounded(20)
@given(st.sampled_from(SHIPPED), st.data())
def test_any_value_in_the_place_of_any_other_is_taken_or_refused_with_a_message(folder, path, data):
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    for _ in range(data.draw(st.integers(1, 3))):
        place = values
        *above, last = data.draw(st.sampled_from(KEYS)).split(".")
        for key in above:
            place = place[key] if isinstance(place.get(key), dict) else place.setdefault(f"{key}", {}) or {}
            if not isinstance(place, dict):
                break
        else:
            place[last] = data.draw(VALUES)
    file = folder / "mutated.yaml"
    file.write_text(yaml.safe_dump(values, allow_unicode=False), encoding="utf-8")
    read_everywhere(str(file))


@bounded(30)
@given(st.sampled_from(SHIPPED), st.data())
def test_any_damage_to_the_text_of_a_configuration_is_told_in_a_message(folder, path, data):
    raw = path.read_bytes()
    for _ in range(data.draw(st.integers(1, 4))):
        at, cut = data.draw(st.integers(0, len(raw))), data.draw(st.sampled_from([0, 0, 1, 10, 100]))
        new = data.draw(st.one_of(ODD_TEXTS.map(lambda t: t.encode("utf-8", "surrogatepass")), st.binary(max_size=4)))
        raw = raw[:at] + new + raw[at + cut :]
    file = folder / "damaged.yaml"
    file.write_bytes(raw)
    read_everywhere(str(file))


ODD_FILES = {
    "empty": b"",
    "with a byte order mark": b"\xef\xbb\xbfrun: {name: x}\n",
    "utf-16": "run: {name: x}\n".encode("utf-16"),
    "zeros": b"\0" * 100,
    "nested lists": b"run: " + b"[" * 5000,
    "nested mappings": b"{a: " * 5000,
    "nested by lines": b"- " * 3000 + b"x",
    "two documents": b"run: {}\n---\nrun: {}\n",
    "a key twice": b"run: {}\nrun: {}\n",
    "a number as key": b"1: 2\n",
    "a tab": b"run:\n\tname: x\n",
    "a tag": b"run: !!python/object/apply:os.system [ls]\n",
    "no mapping": b"[1, 2]\n",
    "extends itself": b"extends: extends itself.yaml\n",
    "extends a folder": b"extends: .\n",
    "extends a list": b"extends: [a]\n",
    "extends a name of 300 characters": b"extends: " + b"x" * 300,
    "extends another kind": b"extends: ../../../../../../../../etc/passwd\n",
    "a long number": b"run: {seed: " + b"9" * 10_000 + b"}\n",
    "an alias of itself": b"run: &a\n  name: *a\n",
    "no such alias": b"run: *a\n",
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_an_odd_file_is_told_in_a_message(folder, name):
    file = folder / f"{name}.yaml"
    file.write_bytes(ODD_FILES[name])
    read_everywhere(str(file))


def test_aliases_that_stand_for_more_values_than_anybody_writes_are_refused_with_their_line(folder):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (folder / "aliases.yaml").write_text("\n".join(lines), encoding="utf-8")
    said = must_end_in_a_message("config", "check", "aliases.yaml")
    assert "aliases.yaml:5: not valid YAML: up to the alias *a3 aliases repeat over 10,000 values; write fewer" in said


def test_aliases_of_what_is_written_often_are_allowed(folder):
    text = "x: &pair {source: train.en, target: train.de}\nrun: {name: a}\ndata: {train: *pair, validation: *pair, test: *pair}\n"
    (folder / "alias.yaml").write_text(text, encoding="utf-8")
    assert "alias.yaml:1: x: no such section" in must_end_in_a_message("config", "check", "alias.yaml")
    assert (
        "alias.yaml:1: x" not in must_end_in_a_message("config", "check", "alias.yaml", "run.name=b").split("x: no")[0]
    )
