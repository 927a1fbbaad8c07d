"""pipeline: runs a graph of verbs on this machine, shows it, or submits it as jobs that wait for each other."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cluster.checks import after_problems, name_problems, sbatch_problems, slurm_problems
from dist_transformer.cluster.jobs import job_of
from dist_transformer.cluster.profiles import fill_from_profile
from dist_transformer.cluster.queue import NOT_SHOWN, known_jobs
from dist_transformer.cluster.run_ref import own_job
from dist_transformer.cluster.script import needed_folders, render_script, with_folders_of
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.cluster.submit import Submission, plan_submission, submit
from dist_transformer.config.data_schema import DataConfig
from dist_transformer.config.schema import Config
from dist_transformer.config.slurm_schema import SlurmConfig
from dist_transformer.config.yaml12 import dump
from dist_transformer.config.yaml_positions import merge
from dist_transformer.errors import EXIT_REQUEUE, ConfigError, MachineError, UserError, say
from dist_transformer.format import table
from dist_transformer.pipeline.results import COLUMNS, report, status_rows
from dist_transformer.pipeline.run import begin, locked, readers_of, run_as_job, run_due, set_aside, words_of
from dist_transformer.pipeline.schema import HEADING, SETTINGS, Pipeline, checked, read_pipeline
from dist_transformer.pipeline.state import State, configuration, input_problems, states_of
from dist_transformer.processes.children import forwarding_signals
from dist_transformer.run.attempts import may_be_hidden
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record

app = typer.Typer(help="A graph of verbs, from text to a small, fast model: run it, or look at it.")
File = Annotated[Path, typer.Argument(help="The YAML file of a pipeline.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Keys over those of the file: root=runs/other nodes.teacher.set.training.max_steps=100"),
]
SUBMITTED = "slurm/pipeline.yaml"
"""The file as it was submitted, in the folder of a node, whose job reads it. (Earlier jobs read ROOT/pipeline.yaml.)"""


@app.command("run")
def run_command(
    file: File,
    overrides: Overrides = None,
    node: Annotated[str, typer.Option(help="One node alone, which `submit` has begun: what its job runs.")] = "",
) -> None:
    """Run the nodes of a pipeline that are not done, one after the other, each as its verb; resumes after a stop.

    Exit codes: 0 all are done, 75 stopped on request (start it again), else that of the verb that failed.
    """
    with forwarding_signals() as signals:
        pipeline = read_pipeline(file, overrides)
        if node:
            sys.exit(run_as_job(pipeline, node, signals))
        with locked(pipeline.root):
            states = states_of(pipeline)
            if jobs := _jobs_of(pipeline, states):
                raise UserError(f"{pipeline.root}: {jobs.popitem()[1]} works on it; wait for it or end it with scancel")
            if problems := input_problems(pipeline, [name for name, state in states.items() if state.restarts]):
                raise ConfigError(problems, HEADING)
            if signals.came:
                sys.exit(EXIT_REQUEUE)
            code = run_due(pipeline, set_aside(pipeline, states), signals)
    if code == 0:
        print(f"{pipeline.root}: all {len(states)} nodes are done")
    sys.exit(code)


@app.command("status")
def status_command(file: File, overrides: Overrides = None) -> None:
    """Show each node of a pipeline: whether it is done, since when, what it has given; changes nothing."""
    pipeline = read_pipeline(file, overrides)
    states, jobs = states_of(pipeline), dict[str, str]()
    try:
        jobs = _jobs_of(pipeline, states)
    except SlurmError as error:
        say(f"Slurm was not asked: {str(error).splitlines()[0]}")
    print(*table(COLUMNS, status_rows(pipeline, states, jobs), is_markdown=True), sep="\n")


@app.command("report")
def report_command(file: File, overrides: Overrides = None) -> None:
    """Print a page in Markdown: scores, sizes and speeds of the models, and every node."""
    pipeline = read_pipeline(file, overrides)
    print("\n".join(report(pipeline, states_of(pipeline))))


def submit_pipeline(file: Path, overrides: list[str], after: tuple[str, ...], *, dry_run: bool) -> None:
    """Submits the nodes that are not done and have no job, a job each, which waits for the jobs of the nodes that it reads.

    Raises ConfigError: problems, before anything is submitted; SlurmError: sbatch failed, after the jobs in the message.
    """
    pipeline = read_pipeline(file, overrides)
    states = states_of(pipeline)
    due = [name for name, state in states.items() if state.is_due]
    anew = [name for name in due if states[name].restarts]
    if problems := input_problems(pipeline, anew):
        raise ConfigError(problems, "cannot submit:")
    if dry_run:
        anew = [name for name in anew if pipeline.folder(name).exists()]
        for name, submission in _planned(pipeline, due, anew, dry_run=True).items():
            waits = tuple(other.upper() for other in pipeline.nodes[name].reads if other in due) or after
            print(f"# {name} begins anew: its folder is kept under another name\n" if name in anew else "", end="")
            print(replace(submission, after=waits).listing)
        return
    with locked(pipeline.root):
        jobs = _jobs_of(pipeline, states)
        due = [name for name in due if name not in jobs]  # some have one where a limit of the QOS cut a submission off
        busy = [n for n in jobs if not due or n not in states or n in anew or {*pipeline.nodes[n].reads} & {*due}]
        if problems := [*sbatch_problems(), *after_problems(after), *(f"{n}: {jobs[n]} works on it" for n in busy)]:
            raise ConfigError(problems, "cannot submit:")
        planned = _planned(pipeline, due, anew)  # before a folder is renamed
        states = set_aside(pipeline, states)
        again = _planned(pipeline, [name for name in anew if states[name].is_due], [])
        planned = {name: again.get(name, each) for name, each in planned.items() if states[name].is_due}
        ids, known = dict[str, str](), {name: job.split()[1] for name, job in jobs.items()}
        for name, submission in planned.items():
            begin(pipeline, name, states[name], "submitted")
            known |= ids
            waits = tuple(known[other] for other in pipeline.nodes[name].reads if other in known) or after
            try:
                [ids[name]] = submit(replace(submission, after=waits)).values()
            except UserError as error:
                back = f"\n  already submitted; to take it back: scancel {' '.join(ids.values())}" if ids else ""
                kind = MachineError if isinstance(error, MachineError) else SlurmError
                raise kind(f"node {name}: {error}{back}") from error
            print(f"submitted job {ids[name]}: {name} ({pipeline.nodes[name].kind})")
    watch = f"dist-transformer pipeline status {shlex.quote(str(file))}"
    print(f"{len(planned)} jobs for {len(states)} nodes; watch: {watch}")


def _planned(pipeline: Pipeline, names: list[str], anew: list[str], *, dry_run: bool = False) -> dict[str, Submission]:
    """The jobs of nodes; what is in the folders of those `anew` does not count. Raises ConfigError: all problems."""
    found, problems = dict[str, Submission](), list[str]()
    for name in names:
        try:
            found[name] = _job_of(pipeline, name, is_anew=name in anew, dry_run=dry_run)
        except ConfigError as error:
            problems += [f"node {name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems, "cannot submit:")
    return found


def _job_of(pipeline: Pipeline, name: str, *, is_anew: bool, dry_run: bool) -> Submission:
    """The job of a node: of `train` an ordinary job of a run. Raises ConfigError: all problems of the node."""
    node, run_dir = pipeline.nodes[name], RunDir(pipeline.folder(name))
    if node.kind == "train":
        config = fill_from_profile(configuration(pipeline, name))
        return plan_submission(config, run_dir, after=node.reads, problems=[], dry_run=dry_run, is_anew=is_anew)
    given = merge(pipeline.section("set"), pipeline.section("nodes", name))
    slurm, problems = checked(given, ("slurm",), SlurmConfig, given.values.get("slurm", {}))
    folders = [pipeline.root, pipeline.located(".")]
    if node.kind == "prepare":
        folders += needed_folders(configuration(pipeline, name), pipeline.root)
    folders = with_folders_of(folders, filter(Path.is_absolute, map(Path, words_of(pipeline, name))))
    if not problems:
        slurm = fill_from_profile(Config(data=DataConfig(), slurm=slurm)).slurm
        problems = [*name_problems(run_dir), *slurm_problems(slurm, folders)]
    if problems:
        raise ConfigError(problems)
    copy = run_dir.path / SUBMITTED
    words = ["pipeline", "run", str(copy), "--node", name]
    if node.kind == "translate":
        words = words_of(pipeline, name)[1:]
    elif node.kind == "prepare":
        words = [str(run_dir.path / SETTINGS)]
    job = job_of(node.kind, slurm, run_dir, arguments=words)
    script = render_script(job.script.name, slurm, run_dir.snapshot, folders)
    return Submission(run_dir, {copy: _as_submitted(pipeline), job.script: script}, (job,), ())


def _as_submitted(pipeline: Pipeline) -> str:
    """The file with absolute paths, which a job reads wherever it lies, and configurations as they are now."""
    places = {"root": str(pipeline.root), "data_root": str(pipeline.located("."))}
    values = json.loads(json.dumps({**pipeline.marked.values, **places}))  # plain types
    for name, node in values["nodes"].items():
        if node.get("config"):
            node["config"] = str(pipeline.folder(name) / SETTINGS)
    return dump(values)


def _jobs_of(pipeline: Pipeline, states: dict[str, State]) -> dict[str, str]:
    """Returns the state of each job of a node, or of `readers_of`, that is not over; {} without Slurm. Raises SlurmError.
    Warns of a node that begins anew while Slurm may hide its job."""
    if sbatch_problems():
        return {}
    folders = {name: RunDir(pipeline.folder(name)) for name in [*pipeline.nodes, *readers_of(pipeline, states)]}
    noted = {name: read_record(run_dir.job) for name, run_dir in folders.items()}
    ids = {name: next(iter(job.get("stages", {}).values()), job.get("job_id", "")) for name, job in noted.items()}
    due = [name for name, state in states.items() if state.is_due and ids[name]]
    hidden = {name: ids[name] for name in due if may_be_hidden(folders[name], ids[name])}
    known = known_jobs([*filter(None, ids.values())], hidden.values())
    for name, job_id in hidden.items():
        if job_id not in known and states[name].restarts:
            say(f"warning: node {name}: {NOT_SHOWN.format(job_id)}")
    jobs = {name: own_job(known.get(job_id), folders[name]) for name, job_id in ids.items()}
    return {name: f"job {ids[name]} {job.state.lower()}" for name, job in jobs.items() if job and not job.is_over}
