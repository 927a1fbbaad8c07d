"""Locations of the files of a corpus: paths, addresses and patterns in the configuration; no file is read."""

import glob
import os


def located(root: str, name: str) -> str:
    """Returns the path or address of a file of the configuration: `name` itself if absolute, else inside `root`."""
    name, root = _local_path(name), _local_path(root)
    if is_address(name):
        chain, link, last = name.rpartition("::")  # zip://a.en::a.zip: the archive is a file as others are
        return name if is_address(last) else f"{chain}{link}{located(root, last)}"
    return f"{root.rstrip('/')}/{name}" if is_address(root) and not os.path.isabs(name) else os.path.join(root, name)


def is_address(location: str) -> bool:
    """True if a location is an address for fsspec, and not a path on this machine."""
    return "://" in location


def is_pattern(location: str) -> bool:
    """True if a location is a pattern, which may match several files. The `?` of a web address begins its query."""
    magic = "*[" if location.startswith(("http://", "https://")) else "*?["
    return any(character in location for character in magic)


def local_files(root: str, name: str) -> list[str]:
    """Returns the local files that match a name or pattern, in the order of their names; none: there is no such file. A
    name of an existing file is no pattern, whatever its characters."""
    path, root = located(root, name), _local_path(root)
    if os.path.isfile(path):
        return [path]
    if not is_pattern(name) or "\0" in path:
        return []
    pattern = os.path.join(glob.escape(root), _local_path(name))
    return sorted({found for found in glob.glob(pattern, recursive=True) if os.path.isfile(found)})


def _local_path(name: str) -> str:
    return os.path.expanduser(name.removeprefix("file://").removeprefix("local://"))
