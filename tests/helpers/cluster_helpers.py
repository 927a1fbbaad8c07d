"""Configurations, and a Slurm that only records, for the tests of submission."""

import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.config.schema import Config

NASTY = [
    "two words",
    "it's",
    'say "hi"',
    "$(touch executed)",
    "`touch executed`",
    "a;touch executed",
    "x\ntouch executed",
    "naïve ßtraße 日本",
    "--dashes",
    "~/$HOME/*",
    "\\",
    "",
]


def config_of(
    *, lanes: int = 8, keep_last: int = 5, every_steps: int = 1000, data: dict[str, Any] | None = None, **slurm: Any
) -> Config:
    """The demo corpus, with these settings of the section slurm and a few others."""
    return Config.model_validate(
        {
            "data": {"train": {"demo": "train"}, "lanes": lanes, **(data or {})},
            "checkpoints": {"keep_last": keep_last, "every_steps": every_steps},
            "slurm": slurm,
        }
    )


@dataclass(frozen=True)
class FakeSlurm:
    """sbatch that records what it is given and gives the ids 4711, 4712 ...; squeue that prints the file `jobs`."""

    folder: Path

    def program(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def set_jobs(self, text: str) -> None:
        """What squeue prints, whatever it is asked."""
        (self.folder / "jobs").write_text(text)

    @property
    def calls(self) -> list[list[str]]:
        """The argv of each call of sbatch."""
        return [path.read_text().split("\0")[:-1] for path in sorted(self.folder.glob("call-*.argv"))]

    @property
    def environments(self) -> list[dict[str, str]]:
        texts = [path.read_text() for path in sorted(self.folder.glob("call-*.env"))]
        return [dict(line.split("=", 1) for line in text.split("\0")[:-1]) for text in texts]


SBATCH = """
cd "$(dirname "$0")"
count=(call-*.argv)
[ -e "${count[0]}" ] && number=${#count[@]} || number=0
printf '%s\\0' "$@" > "call-$number.argv"
env -0 > "call-$number.env"
echo "$((4711 + number));cluster"
"""


def small_snapshot(folder: Path) -> None:
    """In the place of a copy of the whole program, which has tests of its own: a new folder without what was in it."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "dist_transformer").mkdir(parents=True)
