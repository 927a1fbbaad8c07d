"""The command in this process, for hundreds of runs: its exit code and what it wrote; anything else that it raises is a
traceback for its user."""

import contextlib
import io
from collections.abc import Callable
from unittest import mock

from dist_transformer.cli.main import app, main

TAKES_A_MESSAGE = (0, 2)


def run_command(*arguments: str, text: str = "", program: Callable[..., object] = app) -> tuple[int, str]:
    """Exit code and both outputs. `text`: standard input."""
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    given = io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape")), encoding="utf-8")
    with (
        mock.patch("gc.freeze"),  # what is frozen is never freed
        mock.patch("sys.stdin", given),
        contextlib.redirect_stdout(written),
        contextlib.redirect_stderr(written),
    ):
        code: object = 0
        try:
            main(lambda: program(list(arguments)))
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    return code, written.buffer.getvalue().decode("utf-8")


def must_end_in_a_message(*arguments: str, text: str = "") -> str:
    """Runs the command, which must do its work or say in a message why it does not."""
    code, output = run_command(*arguments, text=text)
    assert code in TAKES_A_MESSAGE, (arguments, code, output)
    assert "Traceback" not in output, (arguments, output)
    assert code == 0 or output.strip(), (arguments, "says nothing")
    return output
