"""Opens files by path or address: paths on this machine, and every address that fsspec supports.

fsspec is imported only for an address. Exceptions of a filesystem pass through unchanged to callers that retry (see
retries.py); `named_errors` turns them into a DataError, or a MachineError.
"""

import hashlib
import io
import logging
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

import pyarrow.parquet as pq

from dist_transformer.config.paths import is_address, is_pattern
from dist_transformer.data.sources.retries import is_outage, read_errors, reason_of, with_retries
from dist_transformer.errors import DataError, MachineError

FINGERPRINT_BLOCK_BYTES = 1 << 20
IDLE_SECONDS = 300
"""Time without data after which the read from a server fails."""
VERSION_FIELDS = ("ETag", "Content-MD5", "Last-Modified")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


def open_binary(file: str) -> BinaryIO:
    """Opens a file for sequential reading. The reads of a remote one are retried where that is possible."""
    if not is_address(file):
        return open(file, "rb")
    remote = retried(file, lambda: _open_remote(file))
    if _answers_ranges(remote):
        return io.BufferedReader(_RetriedReads(file, remote))
    remote.close()
    stream: BinaryIO = _open_stream(file)
    return stream


def open_seekable(file: str) -> BinaryIO:
    """Opens a remote file for random access; DataError if its server sends only complete files."""
    # The readers of such files request exactly what they need: no read-ahead.
    remote: BinaryIO = _open_remote(file, cache_type="none")
    if not _answers_ranges(remote):
        raise DataError(f"{file}: this server sends whole files only, but this format is read in parts. Download it.")
    return remote


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

    For a server that sends only complete files, the version that it reports replaces the digest.
    """
    name = base_name(file)
    if not is_address(file):
        with open(file, "rb") as local:
            return {"name": name, **_ends(local, os.path.getsize(file))}
    with named_errors(file):
        return {"name": name, **retried(file, lambda: _remote_ends(file))}


def base_name(file: str) -> str:
    """Returns the last part of a path or address, without the query of a web address."""
    path = urlsplit(file).path if file.startswith(("http://", "https://")) else file
    return path.rstrip("/").rsplit("/", 1)[-1]


@contextmanager
def named_errors(name: str, problem: str = "cannot be read") -> Iterator[None]:
    """Turns every error of a file, its filesystem or the network into a DataError that names the file; a MachineError if
    the disk or the network failed."""
    try:
        yield
    except _file_errors() as error:
        reason = _reason_of_web(error)
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
    """Reads a remote file in order; a read that fails is retried from its position."""

    def __init__(self, name: str, remote: Any) -> None:
        self._name, self._remote = name, remote
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = retried(self._name, lambda: self._read(len(buffer)))
        if not content and self._position < (getattr(self._remote, "size", None) or 0):
            raise DataError(f"{self._name}: changed while it was read: it is shorter now. Start again.")
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _read(self, size: int) -> bytes:
        self._remote.seek(self._position)
        return bytes(self._remote.read(size))


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
    return (*read_errors(), ValueError, lzma.LZMAError, zlib.error)


def _reason_of_web(error: BaseException) -> BaseException:
    """Returns the actual cause: fsspec raises "no such file" for every unusable or missing answer of a web server."""
    cause = error.__cause__
    is_other = isinstance(cause, OSError) or getattr(cause, "status", 404) != 404
    return cause if isinstance(error, FileNotFoundError) and cause is not None and is_other else error


def _open_remote(file: str, **options: Any) -> Any:
    filesystem, path = _filesystem(file)
    return filesystem.open(path, "rb", **options)


def _open_stream(file: str) -> Any:
    """Opens a single response of a web server, read from start to end without a limit of the total time."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=IDLE_SECONDS, sock_read=IDLE_SECONDS)
    filesystem, path = _filesystem(file, client_kwargs={"timeout": timeout})
    return filesystem.open(path, "rb", block_size=0)


def _answers_ranges(remote: Any) -> bool:
    """True if any part of a remote file can be requested; only web servers may refuse."""
    if "http" not in getattr(getattr(remote, "fs", None), "protocol", ()):
        return True
    if not remote.size:
        return False
    with suppress(ValueError):
        remote.seek(remote.size - 1)
        remote.read(1)
        remote.seek(0)
        return True
    return False


def _info(file: str) -> dict[str, Any]:
    filesystem, path = _filesystem(file)
    return dict(filesystem.info(path))


def _matching(address: str) -> list[str]:
    filesystem, path = _filesystem(address)
    if filesystem.exists(path):
        return [address]
    found = filesystem.glob(path, detail=True)
    names = sorted(name for name, info in found.items() if info.get("type") != "directory")
    if "::" not in address:
        return [filesystem.unstrip_protocol(name) for name in names]
    beginning = address[: address.rindex("://") + 3]  # simplecache::s3://bucket/*.gz
    return [f"{beginning}{name}" for name in names]


def _remote_ends(file: str) -> dict[str, Any]:
    with _open_remote(file, cache_type="none") as remote:
        if _answers_ranges(remote):
            if (size := _info(file).get("size")) is None:
                raise DataError(f"{file}: the server does not say how large this file is. Download it.")
            return _ends(remote, int(size))
    info = _info(file)
    version = next((info[field] for field in VERSION_FIELDS if info.get(field)), None)
    return {"bytes": info.get("size"), "version": version}


def _ends(file: BinaryIO, size: int) -> dict[str, Any]:
    digest = hashlib.sha256(file.read(FINGERPRINT_BLOCK_BYTES))
    file.seek(max(0, size - FINGERPRINT_BLOCK_BYTES))
    digest.update(file.read(FINGERPRINT_BLOCK_BYTES))
    return {"bytes": size, "ends_sha256": digest.hexdigest()}
