"""The command sets how threads wait before it reads its arguments, and imports the verb that they name alone."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dist_transformer.cli.main import VERBS, Commands, app, first_sentence
from dist_transformer.errors import UserError

FOUND_WITH_CONFIG = [f"dist_transformer.cli.{name}" for name in ("arguments", "config_verbs", "main")]
START_THEN_IMPORT_TORCH = """
from dist_transformer.cli import main
main.run_as_command = lambda app: __import__("torch")
main.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
)
def test_waiting_threads_soon_make_room_for_other_processes_unless_the_user_set_how_they_wait(given, expected):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    told = subprocess.run(
        [sys.executable, "-c", START_THEN_IMPORT_TORCH],
        env={**environment, **given, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert f"GOMP_SPINCOUNT = '{expected}'" in told


def test_the_list_of_verbs_says_what_each_says_of_itself():
    for verbs in VERBS.values():
        for verb in verbs:
            command = Commands()[verb]
            assert (command.name, command.get_short_help_str(1000)) == (verb, first_sentence(verb))
            assert not hasattr(command, "commands") or command.commands, f"{verb} has no verbs below it"
    shown = CliRunner().invoke(app, ["--help"]).output.partition("\nTrain:\n")[2].splitlines()
    assert [line.split()[0] for line in shown if line[:2] == "  " and line[2] != " "] == [
        verb for verbs in VERBS.values() for verb in verbs
    ]


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["demo-corpus", ""], "the argument after demo-corpus"),
        (["translate", "model", "--input", "", "--output", "out"], "the argument after --input"),
        (["translate", "model", "--input", "in", "--output="], "--output"),
        (["pipeline", "status", ""], "the argument after status"),
    ],
)
def test_an_empty_argument_is_not_taken_for_the_current_folder(arguments, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal = CliRunner().invoke(app, arguments).exception
    assert isinstance(refusal, UserError)
    assert str(refusal) == f"{place}: is empty, as of a variable that is not set; give a value, or leave it out"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("after", [["--after", ""], ["--after="]])
def test_a_job_may_begin_after_none(after, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal = CliRunner().invoke(app, ["submit", "my.yaml", *after, "--dry-run"]).exception
    assert "my.yaml: no such file" in str(refusal)


def test_a_verb_is_found_without_the_others():
    found = subprocess.run(
        [sys.executable, "-c", "import sys; from dist_transformer.cli.main import app; app(standalone_mode=False);"
         "print(*sorted(n for n in sys.modules if n.startswith('dist_transformer.cli.')))", "config", "check", "--help"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert found[-len(FOUND_WITH_CONFIG) :] == FOUND_WITH_CONFIG
    unknown = CliRunner().invoke(app, ["trian"])
    assert unknown.exit_code == 2
    assert "No such command 'trian'. Did you mean 'train'" in unknown.output


@pytest.mark.parametrize(
    "given",
    [
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2"},  # a shell of salloc
        {"SLURM_NTASKS": "2"},  # a batch script
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PTY_PORT": "4000"},  # a shell of `srun --pty`
        {"SLURM_STEP_NUM_TASKS": "2", "RANK": "0"},  # launch/slurm_task.sh, but without the rest of it
    ],
)
def test_train_that_srun_starts_in_several_tasks_which_are_no_ranks_is_refused(given, monkeypatch):
    """Each would train the same run on one rank, or say that an earlier attempt has not ended."""
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PTY_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    error = CliRunner().invoke(app, ["train", "nonexistent.yaml", "--ranks", "2"]).exception
    assert isinstance(error, UserError)
    is_refused = given == {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    assert ("srun started 2 tasks without RANK: expected one" in str(error)) == is_refused, error
