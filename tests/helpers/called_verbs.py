"""Verbs of the command line, called in this process."""

from typer.testing import CliRunner, Result

from dist_transformer.cli.main import app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code != 0
    return str(result.exception)
