"""No hang: a silent rank says where it stands and leaves with its own code."""

import subprocess
import sys

from dist_transformer.errors import EXIT_HANG

PROGRAM = """
import threading
from dist_transformer.training.watchdog import Watchdog
with Watchdog(hang_seconds=1, rank=3) as watchdog:
    {body}
"""


def run(body: str) -> "subprocess.CompletedProcess[str]":
    program = PROGRAM.format(body=body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_no_progress_ends_the_process_with_the_stacks_of_all_threads():
    done = run('watchdog.progress("computing step 7"); threading.Event().wait()')
    assert done.returncode == EXIT_HANG
    assert "rank 3: no progress for" in done.stderr
    assert "while computing step 7" in done.stderr
    assert 'File "<string>", line 5 in <module>' in done.stderr


def test_progress_keeps_it_alive():
    body = "event = threading.Event(); [(event.wait(0.3), watchdog.progress('working')) for _ in range(6)]"
    assert run(body).returncode == 0
