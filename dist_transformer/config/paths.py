"""Where the files of a corpus are: names, addresses and patterns in the configuration, without reading any of them."""

import glob
import os

_LOCAL_SCHEMES = ("file://", "local://")
_PATTERN_CHARACTERS = "*?["


def located(root: str, name: str) -> str:
    """A file of the configuration as a path or an address: `name` itself where it is absolute, else inside `root`."""
    name, root = _local_path(name), _local_path(root)
    if is_address(name):
        return name
    return f"{root.rstrip('/')}/{name}" if is_address(root) and not os.path.isabs(name) else os.path.join(root, name)


def is_address(location: str) -> bool:
    """Whether a location is one that fsspec reads, and not a path on this machine."""
    return "://" in location


def is_pattern(location: str) -> bool:
    """Whether a location may stand for several files. The `?` of a web address begins its query."""
    magic = "*[" if location.startswith(("http://", "https://")) else _PATTERN_CHARACTERS
    return any(character in location for character in magic)


def local_files(root: str, name: str) -> list[str]:
    """The local files that a name or pattern stands for, in the order of their names; none: there is no such file.

    A name that is there as it is written is no pattern.
    """
    path, root = located(root, name), _local_path(root)
    if os.path.isfile(path):
        return [path]
    if not is_pattern(name) or "\0" in path:
        return []
    pattern = os.path.join(glob.escape(root), _local_path(name))
    return sorted(found for found in glob.glob(pattern, recursive=True) if os.path.isfile(found))


def _local_path(name: str) -> str:
    for scheme in _LOCAL_SCHEMES:
        name = name.removeprefix(scheme)
    return os.path.expanduser(name)
