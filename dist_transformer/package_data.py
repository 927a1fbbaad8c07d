"""Location of the files that are shipped with the program: configurations, batch scripts, launch scripts.

In a checkout they are in the folders at its top; an installed wheel carries them inside the package.
`python -m dist_transformer.package_data launch` prints the folder, for shell scripts.
"""

import sys
from pathlib import Path
from typing import Literal, cast, get_args

Kind = Literal["configs", "slurm", "launch"]


def share_folder(kind: Kind) -> Path:
    """Returns the folder of this kind. Raises FileNotFoundError: neither place has it, so the installation is
    incomplete."""
    package = Path(__file__).resolve().parent
    # Inside the package first: an installed one is beside other packages, and `launch` is a common name.
    for folder in (package / "share" / kind, package.parent / kind):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no {kind} folder in {package / 'share'} or {package.parent}; reinstall dist-transformer")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in get_args(Kind):
        sys.exit(f"usage: python -m dist_transformer.package_data {'|'.join(get_args(Kind))}")
    print(share_folder(cast(Kind, sys.argv[1])))
