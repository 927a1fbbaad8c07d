"""Programs that answer like Slurm's, from files: slurm_answers/ says which were captured from a real one."""

import os
from dataclasses import dataclass
from pathlib import Path

ANSWERS = Path(__file__).parent / "slurm_answers"
FORGOTTEN = "slurm_load_jobs error: Invalid job id specified"


@dataclass(frozen=True)
class FakeSlurm:
    """`folder` goes onto PATH. Each program writes its arguments, one a line, into NAME.arguments."""

    folder: Path

    def answers(self, program: str, text: str = "", *, code: int = 0, stderr: str = "") -> None:
        """Makes the program exist and answer so, whatever it is asked. Lines that begin with # are left out."""
        (self.folder / f"{program}.out").write_text("".join(f"{t}\n" for t in text.splitlines() if t[:1] != "#"))
        (self.folder / f"{program}.err").write_text(stderr)
        path = self.folder / program
        path.write_text(
            "#!/bin/sh\n"
            'printf "%s\\n" "$@" > "$0.arguments"; env > "$0.environment"\n'
            f'cat "$0.out"; cat "$0.err" >&2; exit {code}\n'
        )
        path.chmod(0o755)

    def has_forgotten(self) -> None:
        """squeue does not know the job (any more)."""
        self.answers("squeue", code=1, stderr=FORGOTTEN)

    def arguments(self, program: str) -> list[str]:
        """Of its newest call; [] when it was not called."""
        path = self.folder / f"{program}.arguments"
        return path.read_text().splitlines() if path.exists() else []

    def environment(self, program: str) -> list[str]:
        return (self.folder / f"{program}.environment").read_text().splitlines()

    @property
    def path(self) -> str:
        """PATH with these programs alone, and those of the system they are written in."""
        return f"{self.folder}{os.pathsep}{self.folder / 'tools'}"


def make_fake_slurm(folder: Path) -> FakeSlurm:
    """In a new folder. A Slurm that is installed here is not found."""
    tools = folder / "tools"
    tools.mkdir(parents=True)
    for name in ("cat", "env"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    return FakeSlurm(folder)


def job_line(job_id: str, state: str, reason: str = "None", comment: str = "(null)") -> str:
    """A line of squeue in the format that is asked for."""
    start, nodes = ("N/A", "") if state == "PENDING" else ("1795307143", "n[1-2]")
    return f"{job_id}|{job_id.split('_')[0]}|{state}|{start}|9:57|2|{nodes}|main|1795307143|{reason}|{comment}"


def answer(name: str) -> str:
    return (ANSWERS / f"{name}.txt").read_text()
