"""Before it reads its arguments the command sets how threads wait."""

import os
import subprocess
import sys

import pytest

START_THEN_IMPORT_TORCH = """
from dist_transformer.cli import main
main.run_as_command = lambda app: __import__("torch")
main.main()
"""


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
