"""A batch script with the values of one submission in its block of settings; the rest is the file in slurm/."""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from dist_transformer.config.data_checks import corpus_files
from dist_transformer.config.loading import plugins_of
from dist_transformer.config.paths import is_address
from dist_transformer.config.schema import Config
from dist_transformer.config.slurm_schema import CPU_BIND, SlurmConfig, command_options
from dist_transformer.package_data import share_folder

_SETTINGS_BEGIN = "# --- settings"
_SETTINGS_END = "# --- end of settings"
_PYTHON_IN_CONTAINER = "python3"
PREFLIGHT_SECONDS = 180
"""Time limit of the check of the nodes: the disk and the network of a hundred of them are measured in less."""
PREFLIGHT_TOLERANCE = 0.8
"""A node that reaches less than this share of the nodes' median stands out: among sound ones the spread is smaller."""


def render_script(name: str, slurm: SlurmConfig, code: Path, folders: Iterable[Path] = ()) -> str:
    """The text of slurm/NAME with the settings of `slurm`; its interpreter is that of this process.

    Args:
        code: folder of the package that the job runs.
        folders: folders that must be visible to the ranks, also inside a container.
    """
    lines = (share_folder("slurm") / name).read_text(encoding="utf-8").splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith(_SETTINGS_BEGIN))
    end = next(n for n, line in enumerate(lines) if line.startswith(_SETTINGS_END))
    settings = _settings(slurm, code, folders, name != "prepare.sbatch")
    return "\n".join([*lines[: begin + 1], *settings, *lines[end:], ""])


def needed_folders(config: Config, root: Path) -> list[Path]:
    """Folders that every rank uses: `root` of the run folders, the text, the prepared corpus, those of files elsewhere."""
    given = [config.data.root, config.data.prepared, config.training.init_from]
    local = [Path(path).absolute() for path in given if path is not None and not is_address(path)]
    of_plugins = (each.rpartition(":")[0] for each in plugins_of(dict(config)).values() if each and ".py:" in each)
    models = (config.tokenizer.source_model, config.tokenizer.target_model)
    files = (*corpus_files(config.data), *filter(None, models), *of_plugins)
    return with_folders_of([root.absolute(), *local], (Path(file).expanduser() for file in files))


def with_folders_of(folders: Iterable[Path], paths: Iterable[Path]) -> list[Path]:
    """The folders, and those of the paths that are not in them."""
    found = list(dict.fromkeys(folders))
    for folder in (path if path.is_dir() else path.parent for path in map(Path.absolute, paths)):
        if not any(map(folder.is_relative_to, found)):
            found.append(folder)
    return found


def _settings(slurm: SlurmConfig, code: Path, folders: Iterable[Path], may_use_gpus: bool) -> list[str]:
    # The submitting interpreter is the host's; the image has its own on its PATH.
    inside = {"DIST_TRANSFORMER_PYTHON": _PYTHON_IN_CONTAINER} if slurm.container_image else {}
    if inside and slurm.container_runtime == "pyxis" and slurm.gpus_per_node and may_use_gpus:
        # enroot shows none without
        inside |= {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in {**inside, **slurm.environment}.items()),
        f"export DIST_TRANSFORMER_SIGNAL_SECONDS={slurm.signal_seconds}",
        f"python={shlex.quote(sys.executable)}",
        f"code={shlex.quote(str(code))}",
        f"setup={shlex.quote(chr(10).join(slurm.setup))}",
        f"srun_options={_bash_array(_srun_options(slurm, folders))}",
        f"rank_prefix={_bash_array(_rank_prefix(slurm, folders))}",
        f"preflight={slurm.preflight}",
        f"preflight_seconds={PREFLIGHT_SECONDS}",
        f"preflight_tolerance={PREFLIGHT_TOLERANCE}",
        f"spare_nodes={slurm.spare_nodes}",
    ]


def _srun_options(slurm: SlurmConfig, folders: Iterable[Path]) -> list[str]:
    options = []
    if slurm.container_image is not None and slurm.container_runtime == "pyxis":
        mounts = ",".join(_mounts(slurm, folders))
        options += [f"--container-image={slurm.container_image}", f"--container-mounts={mounts}"]
        options += ["--no-container-mount-home"]
    return [*command_options({"cpu-bind": CPU_BIND, **slurm.srun}), *options]


def _rank_prefix(slurm: SlurmConfig, folders: Iterable[Path]) -> list[str]:
    if slurm.container_image is None or slurm.container_runtime != "apptainer":
        return []
    graphics = ["--nv"] if slurm.gpus_per_node else []
    binds = [part for mount in _mounts(slurm, folders) for part in ("--bind", mount)]
    return ["apptainer", "exec", *graphics, *binds, slurm.container_image]


def _mounts(slurm: SlurmConfig, folders: Iterable[Path]) -> list[str]:
    """Mounts as source:destination; those of the configuration come last, so that they can cover a folder."""
    wanted = [*map(str, folders), *slurm.container_mounts]
    return list(dict.fromkeys(mount if ":" in mount else f"{mount}:{mount}" for mount in wanted))


def _bash_array(words: list[str]) -> str:
    return f"({' '.join(map(shlex.quote, words))})"
