"""Opens files by path or address: paths on this machine, and every address that fsspec supports.

fsspec is imported only for an address. Exceptions of a filesystem pass through unchanged to callers that retry (see
retries.py); `named_errors` turns them into a DataError, or a MachineError.
"""

import errno
import hashlib
import io
import logging
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

import pyarrow.parquet as pq

from dist_transformer.config.paths import is_address, is_pattern
from dist_transformer.data.sources.retries import cause_of, is_outage, read_errors, reason_of, with_retries
from dist_transformer.errors import DataError, MachineError

FINGERPRINT_BLOCK_BYTES = 1 << 20
RANGE_PROBES = 3
"""Requests for a part of a file before its server counts as one that sends whole files: a proxy may do it now and then."""
IDLE_SECONDS = 300
"""Time without data after which the read from a server fails."""
VERSION_FIELDS = ("ETag", "Content-MD5", "Last-Modified")
Result = TypeVar("Result")
log = logging.getLogger(__name__)
_warn_once = cache(log.warning)


def open_binary(file: str) -> BinaryIO:
    """Opens a file for sequential reading. The reads of a remote one are retried where that is possible."""
    if not is_address(file):
        return open(file, "rb")
    return retried(file, lambda: _open_parts(file) or _open_stream(file))


def open_seekable(file: str) -> BinaryIO:
    """Opens a remote file for random access, with retries; DataError if its server sends only complete files."""
    if remote := retried(file, lambda: _open_parts(file, exact=True)):
        return remote
    raise DataError(f"{file}: this server sends whole files only, but this format is read in parts. Download it.")


def open_parquet(file: str) -> pq.ParquetFile:
    """Opens a parquet file by path or address. Pages are checked against their checksums, if the file has them."""
    if not is_address(file):
        return pq.ParquetFile(file, page_checksum_verification=True)
    return pq.ParquetFile(open_seekable(file), pre_buffer=True, page_checksum_verification=True)


def files_of_address(address: str) -> list[str]:
    """Returns the addresses that match a pattern, in order; for an address that is no pattern the address itself.

    DataError if no file matches, or if this kind of filesystem cannot be listed.
    """
    if not is_pattern(address):
        return [address]
    with named_errors(address):
        try:
            found = retried(address, lambda: _matching(address))
        except NotImplementedError:
            raise DataError(f"{address}: files there cannot be listed; write an address without *, ? and [.") from None
    if not found:
        raise DataError(f"{address}: no file fits this pattern. Check the address and the access to it.")
    return found


def file_fingerprint(file: str) -> dict[str, Any]:
    """Returns name, size and the SHA-256 of the first and last MiB of a file: independent of its location.

    For a server that sends only complete files, the version that it reports replaces the digest, or
    without one the SHA-256 of the first MiB.
    """
    name = base_name(file)
    if not is_address(file):
        with open(file, "rb") as local:
            return {"name": name, **_ends(local, os.path.getsize(file))}
    with named_errors(file):
        return {"name": name, **retried(file, lambda: _remote_ends(file))}


def base_name(file: str) -> str:
    """Returns the last part of a path or address, without the query of a web address; of zip://t.tsv::a.zip its t.tsv."""
    file = file.partition("::")[0] if file.startswith(("zip://", "tar://")) else file
    path = urlsplit(file).path if file.startswith(("http://", "https://")) else file
    return path.rstrip("/").rsplit("/", 1)[-1]


@contextmanager
def named_errors(name: str, problem: str = "cannot be read") -> Iterator[None]:
    """Turns every error of a file, its filesystem or the network into a DataError that names the file; a MachineError if
    the disk or the network failed."""
    try:
        yield
    except _file_errors() as error:
        reason = cause_of(error)
        if isinstance(reason, FileNotFoundError) and is_address(name):
            raise DataError(f"{name}: no such file. Check the address and the access to it.") from error
        kind = MachineError if is_outage(reason) else DataError
        raise kind(f"{name}: {problem}: {type(reason).__name__}: {reason_of(reason)}") from error


def retried(file: str, read: Callable[[], Result]) -> Result:
    """Calls `retried_remote`; a file on this machine is read once."""
    return retried_remote(file, read) if is_address(file) else read()


def retried_remote(name: str, read: Callable[[], Result]) -> Result:
    """Calls `with_retries` with warnings that name what is read."""
    return with_retries(read, lambda reason: log.warning("%s: %s", name, reason))


class _RetriedReads(io.RawIOBase):
    """Reads a remote file; a read that fails is retried from its position."""

    def __init__(self, name: str, remote: Any, owner: Any, exact: bool) -> None:
        self._name, self._remote, self._position = name, remote, 0
        self._owner = owner  # the filesystem: that of an archive closes its files when nothing holds it
        self._least_bytes = 0 if exact else getattr(remote, "size", None) or 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = int(self._remote.seek(offset, whence))
        return self._position

    def readinto(self, buffer: Any) -> int:
        content = retried(self._name, lambda: self._read(len(buffer)))
        if not content and self._position < self._least_bytes:
            raise DataError(f"{self._name}: changed while it was read: it is shorter now. Start again.")
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _read(self, size: int) -> bytes:
        self._remote.seek(self._position)
        try:
            return bytes(self._remote.read(size))
        except ValueError as error:  # a web server that has sent parts of files sends the whole file now
            raise OSError(errno.EIO, reason_of(error)) from error


def _filesystem(address: str, **options: Any) -> tuple[Any, str]:
    """Returns the filesystem of an address and the path in it; DataError if it is unknown or its package missing."""
    import fsspec

    try:
        filesystem, path = fsspec.url_to_fs(address, **options)
    except ImportError as error:
        package = getattr(error.__cause__ or error, "name", None) or reason_of(error)
        raise DataError(
            f"{address}: {address.split('://')[0]}:// needs the package {package}: pip install {package}"
        ) from error
    except ValueError as error:
        raise DataError(f"{address}: not an address that can be read: {reason_of(error)}") from error
    return filesystem, path


def _file_errors() -> tuple[type[Exception], ...]:
    of_hub = getattr(sys.modules.get("datasets.exceptions"), "DatasetsError", OSError)  # imported for the Hub alone
    return (*read_errors(), ValueError, lzma.LZMAError, zlib.error, of_hub)


def _open_stream(file: str) -> Any:
    """Opens a single response of a web server, read from start to end without a limit of the total time."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=IDLE_SECONDS, sock_read=IDLE_SECONDS)
    filesystem, path = _filesystem(file, client_kwargs={"timeout": timeout})
    return filesystem.open(path, "rb", block_size=0)


def _open_parts(file: str, exact: bool = False) -> BinaryIO | None:
    """Opens a remote file of which any part can be requested; None if its server sends only complete files.

    No read-ahead for readers that request exactly what they need (`exact`), and know where the file ends.
    """
    owner, path = _filesystem(file)
    remote = owner.open(path, "rb", **({"cache_type": "none"} if exact else {}))
    for _ in range(RANGE_PROBES):
        with suppress(ValueError):
            if "http" in getattr(getattr(remote, "fs", None), "protocol", ()):  # only web servers may refuse
                remote.seek(-1, os.SEEK_END)
                remote.read(1)
                remote.seek(0)
            return io.BufferedReader(_RetriedReads(file, remote, owner, exact), 1 if exact else io.DEFAULT_BUFFER_SIZE)
    remote.close()
    return None


def _matching(address: str) -> list[str]:
    filesystem, path = _filesystem(address)
    if filesystem.exists(path):
        return [address]
    found = filesystem.glob(path, detail=True)
    names = sorted(name for name, info in found.items() if info.get("type") != "directory")
    if "::" not in address:
        return [filesystem.unstrip_protocol(name) for name in names]
    beginning, _, pattern = address.partition("://")  # simplecache::s3://bucket/*.gz or zip://*.en::s3://bucket/a.zip
    rest = "".join(pattern.partition("::")[1:])
    return [f"{beginning}://{name.split('://')[-1]}{rest}" for name in names]


def _remote_ends(file: str) -> dict[str, Any]:
    filesystem, path = _filesystem(file)
    info = filesystem.info(path)
    if remote := _open_parts(file, exact=True):
        if (size := info.get("size")) is None:
            raise DataError(f"{file}: the server does not say how large this file is. Download it.")
        with remote:
            return _ends(remote, int(size))
    version = next((info[field] for field in VERSION_FIELDS if info.get(field)), None)
    found = {"bytes": info.get("size"), "version": version}
    if not version:
        _warn_once("%s: its server tells no version: only changes of its size or first MiB will be noticed", file)
        with io.BufferedReader(_open_stream(file)) as stream:
            found["beginning_sha256"] = hashlib.sha256(stream.read(FINGERPRINT_BLOCK_BYTES)).hexdigest()
    return found


def _ends(file: BinaryIO, size: int) -> dict[str, Any]:
    digest = hashlib.sha256(file.read(FINGERPRINT_BLOCK_BYTES))
    file.seek(max(0, size - FINGERPRINT_BLOCK_BYTES))
    digest.update(file.read(FINGERPRINT_BLOCK_BYTES))
    return {"bytes": size, "ends_sha256": digest.hexdigest()}
