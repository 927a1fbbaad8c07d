"""The command in this process, for hundreds of runs: its exit code and what it wrote; anything else that it raises is a
traceback for its user."""

import contextlib
import io
from collections.abc import Callable
from unittest import mock

from hypothesis import HealthCheck, Phase, settings

from dist_transformer.cli.main import app, main

DONE_OR_TOLD = (0, 2)
ODD_WORDS = [
    *("", " ", "\0", "a\0b", "..", "../..", "/", "~", "~nobody/x", "x" * 300, "\u2028", "\ud800", "é", "👾"),
    *(
        "-",
        "--",
        "=",
        "a=b",
        "{}",
        "[]",
        "[",
        "{",
        "'",
        '"',
        "*x",
        "&x",
        "!!python/object:os.system",
        "!x y",
        "<<",
        "? a",
    ),
    *(
        "| ",
        "%",
        "@",
        "`",
        "nan",
        ".nan",
        "inf",
        "-.inf",
        "1e999",
        "-1",
        "0",
        "1e400",
        "0x",
        "1_",
        "9" * 400,
        "9" * 5000,
    ),
    *(
        "1e-400",
        "true",
        "null",
        "auto",
        "s3://",
        "s3://a:b@c/d",
        "http://[",
        "https://x:y@h",
        "file:///etc",
        "sqlite:///",
    ),
    *("10:00", "99-99:99", "120G", "1" * 30 + "G", "/dev/null", "/dev/full", "/proc/self/mem"),
]


def bounded(examples: int) -> settings:
    """The same examples every time, without a limit on their time."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip


def run_command(*arguments: str, text: str = "", program: Callable[..., object] = app) -> tuple[int, str]:
    """Exit code and both outputs. `text`: standard input."""
    both = io.BytesIO()
    out, errors = (
        io.TextIOWrapper(both, encoding="utf-8", errors=errors, write_through=True)
        for errors in ("strict", "backslashreplace")
    )
    given = io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape")), encoding="utf-8")
    with (
        mock.patch("gc.freeze"),  # what is frozen is never freed
        mock.patch("sys.stdin", given),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        code: object = 0
        try:
            main(lambda: program(list(arguments)))
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    return code, both.getvalue().decode("utf-8")


def must_end_in_a_message(*arguments: str, text: str = "") -> str:
    """Runs the command, which must do its work or say in a message why it does not."""
    code, output = run_command(*arguments, text=text)
    assert code in DONE_OR_TOLD, (arguments, code, output)
    assert "Traceback" not in output, (arguments, output)
    assert code == 0 or output.strip(), (arguments, "says nothing")
    return output
