"""States of nodes: one is done if its record, node.json, has the key of what goes in now, and what it has made is there.

The key is a digest of the node's settings, the contents of its files, the keys of the nodes that it reads, and the
version of the program. So it is known before those nodes have run.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from dist_transformer import __version__
from dist_transformer.config.checks import file_problems
from dist_transformer.config.data_checks import corpus_files
from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.loading import config_of, flatten, plugins_of, read_extended
from dist_transformer.config.paths import located
from dist_transformer.config.schema import Config
from dist_transformer.config.yaml_positions import Marked, merge, read_yaml
from dist_transformer.data.manifest import json_digest
from dist_transformer.data.sources.first_pairs import first_pairs_problems
from dist_transformer.decoding.sharded_files import same_lines
from dist_transformer.errors import ConfigError, UserError, say
from dist_transformer.files import LEFT_OVER, file_sha256, write_json
from dist_transformer.pipeline.schema import CONFIGURED, HEADING, KINDS, PLACES, RECORD, SETTINGS, Pipeline
from dist_transformer.plugins import find
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record_patiently
from dist_transformer.run.resume_checks import initial_weights_problems

SCORES = " (scores)"
"""Ends the names of files of quality scores among those that a node reads."""
LEXICON = KINDS["train"].outputs["lexicon"]
NOT_COUNTED = ("slurm", "ranks", "processes", "max_tokens", "too_long")
"""Keys of nodes on which no result depends."""
PREPARED_BY: dict[str, Any] = {"run": {"seed"}, "data": True, "tokenizer": True}
NOT_PREPARED_BY = {"lanes", "max_tokens", "window_rows", "loader_workers", "audit"}
"""Settings that a prepared corpus depends on, and those of `data` that are of training alone."""
NO_RESULT = (("training", "hang_seconds"), ("training", "max_hours"), ("training", "log_every_steps"),
             ("data", "loader_workers"), ("data", "audit"),  # the version before counted the rest
             ("decoding", "max_source_tokens"), ("decoding", "max_tokens"))  # fmt: skip
"""Settings on which no result of training depends: a message may have recommended others."""
FREE = ("slurm.", "tracking.", "run.root", "data.root", "data.prepared", "training.zero_stage", *map(".".join, NO_RESULT),
        "training.activation_checkpointing", "training.offload", "checkpoints.keep_last", "checkpoints.keep_every")  # fmt: skip
"""Beginnings of settings which a person who starts the training of a node by hand may change, as messages recommend."""
AS_BEFORE = {
    '"max_steps": null': '"max_steps": 100000',  # beside max_epochs too
    '"matrices": "adam", ': "",
    '"normalization": "nmt_nfkc", ': "",
    '"ema_decay": ': '"compile_layers": false, "ema_decay": ',
}
"""Counted settings as JSON, and as versions before counted them: with other defaults, without new settings, with former ones."""
TEXTS = ("input", "source", "target", "reference", "scores")
Fingerprints = dict[str, list[Any]]
"""Size, modification time in nanoseconds, and SHA-256 of files, by their names."""


@dataclass(frozen=True)
class State:
    """State of a node: "begun": a start resumes it; "changed": its results are of something else, `why` says what.

    `record`: of its newest start; empty if there was none. `now`: of a start now. `restarts`: it begins anew, as it has
    changed or a node that it reads runs. `is_due`: it runs at the next start.
    """

    state: Literal["done", "begun", "changed", "new"]
    why: str
    record: dict[str, Any]
    now: dict[str, Any]
    restarts: bool
    is_due: bool


def states_of(pipeline: Pipeline) -> dict[str, State]:
    """The state of every node, in their order. Raises ConfigError: problems of configurations, missing files."""
    found, problems, hashed = dict[str, State](), list[str](), Fingerprints()
    for name in pipeline.nodes:
        try:
            found[name] = _state_of(pipeline, name, found, hashed)
        except ConfigError as error:
            problems += error.problems
            found[name] = State("new", "", {}, {"key": ""}, restarts=True, is_due=True)  # the others are checked too
    if problems:
        raise ConfigError([*dict.fromkeys(problems)], HEADING)
    return found


def configuration(pipeline: Pipeline, name: str) -> Config:
    """The configuration of a node. Raises ConfigError: all its problems; files that other nodes make may be missing."""
    node = pipeline.nodes[name]
    file = node.values["config"]
    fixed: dict[str, Any] = {"run": {"root": str(pipeline.root), "name": name}, "slurm": node.values["slurm"]}
    if node.kind == "prepare":
        fixed["data"] = {"prepared": str(pipeline.folder(name) / KINDS[node.kind].outputs[""])}
    marked = read_extended(pipeline.path.parent / file) if file else Marked({}, {(): str(pipeline.path)})
    is_whole = file and pipeline.is_made(file)  # as it was submitted, with the folder of its text
    data = {"data": {"root": pipeline.data_root}} if pipeline.data_root and not is_whole else {}
    for layer in (Marked(data), pipeline.section("set"), pipeline.section("nodes", name, "set"), Marked(fixed)):
        marked = merge(marked, layer)
    config = config_of(marked, check_files=False)
    missing = file_problems(config.data, config.tokenizer, pipeline.is_made)
    if node.kind == "train" and not pipeline.is_made(config.training.init_from or pipeline.folder(name)):
        missing += initial_weights_problems(config)
    if missing:
        raise ConfigError([f"{marked.place_of(problem)}: {problem}" for problem in missing])
    return config


def input_problems(pipeline: Pipeline, names: Iterable[str]) -> list[str]:
    """Returns a problem for each text or model that these nodes cannot read, and text that is not as long as its other side."""
    found = list[str]()
    for name in names:
        kind, values, reads = pipeline.nodes[name]
        files = [at for key in TEXTS if values.get(key) and not pipeline.is_made(at := pipeline.located(values[key]))]
        try:
            averaged = [each for each in reads if pipeline.nodes[each].kind == "average"]
            runs = {*reads, *(run for each in averaged for run in pipeline.nodes[each].reads)}
            models = [configuration(pipeline, run).model for run in runs if pipeline.nodes[run].kind == "train"]
            if "model" in values and any(each.plugin for each in models):
                place = f"{pipeline.marked.place(('nodes', name, 'model'))}: nodes.{name}.model"
                found.append(f"{place}: is a network of model.plugin, which no node can load; leave this node out")
            if kind in CONFIGURED and not reads:
                found += first_pairs_problems(configuration(pipeline, name))
            elif kind == "evaluate" and files:  # it reads text as training does
                corpus = CorpusConfig(source=str(files[0]), target=str(files[-1]))
                found += first_pairs_problems(Config(data=DataConfig(validation=corpus)))
            elif files:
                same_lines(*files)
        except UserError as error:
            found.append(str(error))
    return [*dict.fromkeys(found)]


def is_complete(pipeline: Pipeline, name: str) -> bool:
    """True if the verb of a node has ended well; one that is noted as done may be trained further, which keeps its model."""
    node, folder = pipeline.nodes[name], pipeline.folder(name)
    is_ended = node.kind != "train" or read_record_patiently(RunDir(folder).state).get("state") == "finished"
    is_ended |= "done" in read_record_patiently(folder / RECORD)
    return is_ended and all((folder / made).exists() for made in KINDS[node.kind].made)


def made_files(pipeline: Pipeline, name: str, old: Fingerprints | None = None, at: Path | None = None) -> Fingerprints:
    """Fingerprints of what a node has made, in its folder or another."""
    folder = at or pipeline.folder(name)
    paths = [path for made in KINDS[pipeline.nodes[name].kind].made for path in _files_at(folder / made)]
    return _fingerprints({str(path.relative_to(folder)): path for path in paths}, old or {}, {})


def made_at(made: Fingerprints) -> float:
    """When the last of these files was written, in Unix seconds: on Slurm a node is noted as done later."""
    return round(float(max(nanoseconds for _, nanoseconds, _ in made.values())) / 1e9, 3)


def check_unchanged(pipeline: Pipeline, name: str, states: dict[str, State]) -> None:
    """Raises UserError if what goes into a node is not what it was when the states were found."""
    before, now = states[name].now, _state_of(pipeline, name, states, {}).now
    if before["key"] != now["key"]:
        changed = ", ".join(_differences(before["made_of"], now["made_of"]))
        raise UserError(f"node {name}: changed since the pipeline began: {changed}; start the same command again")


def complete(pipeline: Pipeline, name: str) -> None:
    """Notes that a node is done, and what it has made, if not yet noted. Raises UserError: its files or settings changed."""
    record = read_record_patiently(path := pipeline.folder(name) / RECORD)
    if "done" not in record:
        made, before = made_files(pipeline, name), record.get("files", {})
        paths = {file: at for file, at in what_goes_in(pipeline, name)[1].items() if file in before and at.exists()}
        now, done = _fingerprints(paths, before, {}), made_at(made)
        changed = [file for file, each in now.items() if each[-1] != before[file][-1] and each[1] / 1e9 <= done]
        files = (path.with_name(SETTINGS), RunDir(path.parent).config)
        own, ran = (flatten(read_yaml(at).values) if at.is_file() else {} for at in files)
        free = FREE if ran.get("checkpoints.final_model") == "average_best" else (*FREE, "checkpoints.keep_best")
        changed += [key for key in ran if own.get(key, ran[key]) not in (ran[key], "auto") and not key.startswith(free)]
        write_json(path, {**record, "done": done, "made": made, **({"key": ""} if changed else {})})
        if changed:
            raise UserError(f"node {name}: {', '.join(changed)} changed while it ran; start the same command again")


def take_back(pipeline: Pipeline, states: dict[str, State]) -> dict[str, State]:
    """Renames back what was set aside and is what a node without a folder would make, whole, else what of it was begun last,
    and not older than what the node reads. Returns the states after it."""
    is_any = False
    for name, state in states.items():
        folder, reads = pipeline.folder(name), map(pipeline.folder, pipeline.nodes[name].reads)
        since = max((read_record_patiently(path / RECORD).get("done", inf) for path in reads), default=0)
        aside = sorted(folder.parent.glob(f"{name}.[0-9]*"), key=lambda path: (len(path.name), path.name), reverse=True)
        for moment, old in ((moment, old) for moment in ("done", "begun") for old in aside):
            record = read_record_patiently(old / RECORD)
            made, is_same = record.get("made"), record.get("key") == state.now["key"] and not folder.exists()
            if not is_same or not since <= record.get(moment, -1) or (moment == "begun" and "done" in record):
                continue
            if made is None or _sums(made_files(pipeline, name, made, old)) == _sums(made):
                old.rename(folder)
                say(f"{folder}: is {old.name} again, which is of the same settings and files")
                is_any = True
    return states_of(pipeline) if is_any else states


def _state_of(pipeline: Pipeline, name: str, before: dict[str, State], hashed: Fingerprints) -> State:
    root, planned, reads = pipeline.root, before.get(name), pipeline.nodes[name].reads
    record = planned.record if planned else read_record_patiently(pipeline.folder(name) / RECORD)
    settings, named = what_goes_in(pipeline, name)
    known = record.get("files", {}) | (planned.now["files"] if planned else {})
    files = _fingerprints(_by_known_names(named, known, root), known, hashed)
    due = [other for other in reads if before[other].is_due]
    made_of = {
        "settings": json_digest(_moved(json.dumps(settings[0], sort_keys=True), root)),
        "files": _sums(files),
        "nodes": {other: before[other].now["key"] for other in reads},
        "version": __version__,
    }
    made_of = _as_counted_before(made_of, settings, record, due, root)
    now = {"kind": pipeline.nodes[name].kind, "key": json_digest(made_of), "made_of": made_of, "files": files}
    state: Literal["done", "begun", "changed", "new"] = "done"
    why = f"follows {', '.join(due)}" if due else ""
    if "key" not in record:
        state, why = "new", ""
    elif record["key"] != now["key"]:
        why = f"changed: {', '.join(_differences(record.get('made_of', {}), made_of)) or 'files or settings, while it ran'}"
        state = "changed"
    elif not is_complete(pipeline, name):
        state, why = ("changed", "its results are gone") if "done" in record else ("begun", "")
    elif (made := record.get("made")) and _sums(made) != _sums(made_files(pipeline, name, made)):
        state, why = "changed", "its results are not as it made them"
    follows = due if state == "done" else [other for other in due if before[other].restarts]
    anew = state in ("new", "changed") or follows != []
    return State(state, why, record, now, restarts=anew, is_due=anew or state == "begun")


def _by_known_names(named: dict[str, Path], known: Fingerprints, root: Path) -> dict[str, Path]:
    """Returns files by known names: the version before named them by whole paths where data.root ends with slashes."""
    whole = {os.path.normpath(file): file for file in known}
    paths = {file: f"{path}{SCORES if file.endswith(SCORES) else ''}" for file, path in named.items()}
    keys = {file: path.removeprefix(str(root)) for file, path in paths.items()}
    return {file if file in known else whole.get(keys[file], file): path for file, path in named.items()}


def _as_counted_before(
    made_of: dict[str, Any], settings: list[Any], record: dict[str, Any], due: list[str], root: Path
) -> dict[str, Any]:
    """Returns what a node is made of as a former version that made it counted it, so that it is not made again."""
    before = record.get("made_of", {})
    texts = [json.dumps(each, sort_keys=True) for each in settings]
    for now, once in AS_BEFORE.items():
        texts += [text.replace(now, once) for text in texts]
    former = [json_digest(each) for text in texts for each in (text.replace(str(root), ""), _moved(text, root))]
    if (counted := before.get("settings")) in former:
        made_of = made_of | {"settings": counted}
    # They counted no files of quality scores, and no nodes to which a path that was typed leads.
    files = {file: each for file, each in made_of["files"].items() if not file.endswith(SCORES)}
    nodes = {other: key for other, key in made_of["nodes"].items() if other in due or other in before.get("nodes", {})}
    for uncounted in ({"files": files}, {"nodes": nodes}, {"files": files, "nodes": nodes}):
        if record.get("key") == json_digest(made_of | uncounted):
            return made_of | uncounted
    return made_of


def _moved(text: str, root: Path) -> str:
    """Returns settings as JSON with paths relative to the root, which may be moved."""
    start = json.dumps(str(root))[:-1]  # as paths below it begin in JSON
    return text.replace(f"{start}/", '"/').replace(f'{start}"', '""')


def what_goes_in(pipeline: Pipeline, name: str) -> tuple[list[Any], dict[str, Path]]:
    """Settings on which a node's result depends, then as versions before counted them; files that no node makes that it reads."""
    of_kind = _of_configuration if pipeline.nodes[name].kind in CONFIGURED else _of_verb
    settings, named = of_kind(pipeline, name)
    root, start = f"{pipeline.root}/", len(str(pipeline.root))  # the root may be moved
    files = {file[start:] if file.startswith(root) else file: path for file, path in named.items()}
    return settings, {file: path for file, path in files.items() if not pipeline.is_made(path)}


def _of_configuration(pipeline: Pipeline, name: str) -> tuple[list[Any], dict[str, Path]]:
    """`what_goes_in` for a node that has a configuration."""
    kind, config = pipeline.nodes[name].kind, configuration(pipeline, name)
    root = located(config.data.root, "")
    named = {file.removeprefix(root): Path(file.removesuffix(SCORES)) for file in _files_of(config)}
    of_data = {"root", *(NOT_PREPARED_BY if kind == "prepare" else ())}
    left_out: Any = {"run": {"root", "name"}, "data": of_data, "slurm": True, "tracking": True}
    counts = PREPARED_BY if kind == "prepare" else None
    plugins = [find(key, each).identity for key, each in plugins_of(dict(config)).items() if each]
    every = config.model_dump(mode="json", include=counts, exclude=left_out)
    settings: list[Any] = []
    for out in (NO_RESULT, (), NO_RESULT[:5]):
        counted = {at: {key: part[key] for key in part if (at, key) not in out} for at, part in every.items()}
        settings.append([kind, counted, plugins])
    return settings, named


def _of_verb(pipeline: Pipeline, name: str) -> tuple[list[Any], dict[str, Path]]:
    """`what_goes_in` for a node whose keys are the options of its verb. Raises ConfigError: a file is not there."""
    values = pipeline.nodes[name].values
    listed = [(key, each if isinstance(each, tuple) else (each,)) for key, each in values.items() if key in PLACES]
    given = [(key, each, pipeline.located(each)) for key, places in listed for each in places]
    if missing := [(key, path) for key, _, path in given if not path.exists() and not pipeline.is_made(path)]:
        where = [(pipeline.marked.place(("nodes", name, key)), key, path) for key, path in missing]
        raise ConfigError([f"{place}: nodes.{name}.{key}: no such file: {path}" for place, key, path in where])
    runs = [run for run, node in pipeline.nodes.items() if node.kind == "train"]
    lexicons = [run for run in runs if pipeline.folder(run) / LEXICON in (path for _, _, path in given)]
    if without := [run for run in lexicons if not configuration(pipeline, run).training.guided_alignment]:
        place = f"{pipeline.marked.place(('nodes', name, 'shortlist'))}: nodes.{name}.shortlist"
        raise ConfigError([f"{place}: {without[0]} makes no lexicon; set training.guided_alignment there, as 0.1"])
    named = {str(Path(each, at.relative_to(path))): at for _, each, path in given for at in _files_at(path)}
    counted = {key: value for key, value in values.items() if key not in NOT_COUNTED}
    if values.get("engine") == "ctranslate2" and values.get("max_tokens"):
        counted["max_tokens"] = values["max_tokens"]  # lines of a batch share CTranslate2's shortlist
    return [[counted], *([counted | {"too_long": each}] for each in (None, "refuse", "split"))], named


def _files_of(config: Config) -> Iterator[str]:
    yield from corpus_files(config.data, SCORES)
    for path in filter(None, (config.tokenizer.source_model, config.tokenizer.target_model, config.training.init_from)):
        yield from map(str, _files_at(Path(path)))


def _files_at(path: Path) -> list[Path]:
    """A file, or those of a model folder or of a run folder's model, without the card that others write into."""
    if not path.is_dir():
        return [path] if path.exists() else []
    folder = path / "model" if (path / "model").is_dir() else path
    files = [file for file in sorted(folder.iterdir()) if not LEFT_OVER.fullmatch(file.name) and file.is_file()]
    return [file for file in files if file.name != "README.md"]


def _fingerprints(paths: dict[str, Path], known: Fingerprints, hashed: Fingerprints) -> Fingerprints:
    """Fingerprints of files; one that has the size and time of a known one is not read again. `hashed`, by paths, grows."""
    found = {}
    for name, path in paths.items():
        stat = path.stat()
        now, before = [stat.st_size, stat.st_mtime_ns], (known.get(name, []), hashed.get(str(path), []))
        same = next((each for each in before if each[:2] == now), None)
        found[name] = hashed[str(path)] = same or [*now, file_sha256(path)]
    return found


def _sums(files: Fingerprints) -> dict[str, str]:
    return {name: each[-1] for name, each in files.items()}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yields what differs: settings, version, the names of files and nodes."""
    yield from (part for part in ("settings", "version") if before.get(part) != now[part])
    for part in ("files", "nodes"):
        old, new = before.get(part, {}), now[part]
        yield from sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
