"""An endpoint on this machine that speaks what `datasets` asks of the Hugging Face Hub (HF_ENDPOINT), for one dataset.

    GET  /api/datasets/ID[/revision/R]       its commit and files
    GET  /api/datasets/ID/tree/R[/FOLDER]    the entries of a folder
    POST /api/datasets/ID/paths-info/R       the entries of some paths
    HEAD, GET /datasets/ID/resolve/R/FILE    a file or a range of it, with its commit and ETag

Errors carry X-Error-Code, as the Hub's do. A commit before the last `push` is still there by its id.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class HubServer(ThreadingHTTPServer):
    """Serves the files of `folder` as the dataset `name`."""

    daemon_threads = True

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.port = name, self.server_address[1]
        self.commits: list[Path] = [folder]

    @property
    def folder(self) -> Path:
        return self.commits[-1]

    def push(self, folder: Path) -> None:
        """Makes the files of another folder the newest commit."""
        self.commits.append(folder)

    def commit(self, folder: Path | None = None) -> str:
        """Returns the id of what the dataset is now, or was in a folder."""
        return hashlib.sha1("".join(digest(file) for file in files_in(folder or self.folder)).encode()).hexdigest()

    def folder_of(self, revision: str) -> Path | None:
        """Returns the files of main, or of a commit; None for another revision."""
        found = [folder for folder in self.commits if revision == self.commit(folder)]
        return self.folder if revision in ("", "main") else next(iter(found), None)

    @staticmethod
    def entry(folder: Path, path: Path) -> dict[str, Any]:
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}
        return {"type": "file", "oid": digest(path), "size": path.stat().st_size, "path": name}


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def hub_server(folder: Path, name: str) -> Iterator[HubServer]:
    server = HubServer(folder, name)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(unquote(self.path))
        api, files = f"/api/datasets/{self.server.name}", f"/datasets/{self.server.name}/resolve/"
        if address.path.startswith(files):
            self._answer_file(address.path.removeprefix(files).partition("/"))
        elif address.path == api or address.path.startswith(f"{api}/"):
            self._answer_api(address.path.removeprefix(api).strip("/").split("/", 2), parse_qs(address.query), body)
        else:
            self._refuse("RepoNotFound")

    do_GET = do_HEAD = do_POST = _any

    def _answer_api(self, asked: list[str], query: dict[str, list[str]], body: bytes) -> None:
        kind, revision, below = [*asked, "", ""][:3]
        entry = self.server.entry
        if (folder := self.server.folder_of(revision)) is None:
            self._refuse("RevisionNotFound")
        elif kind in ("", "revision"):
            siblings = [{"rfilename": entry(folder, file)["path"]} for file in files_in(folder)]
            state = {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
            self._answer_json(
                {"id": self.server.name, "sha": self.server.commit(folder), "siblings": siblings, **state}
            )
        elif kind == "tree" and (folder / below).is_dir():
            entries = (folder / below).rglob("*") if query.get("recursive") == ["true"] else (folder / below).iterdir()
            self._answer_json([entry(folder, path) for path in sorted(entries)])
        elif kind == "paths-info":
            paths = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            self._answer_json([entry(folder, folder / path) for path in paths if (folder / path).exists()])
        else:
            self._refuse("EntryNotFound")

    def _answer_file(self, asked: tuple[str, str, str]) -> None:
        revision, _, name = asked
        if (folder := self.server.folder_of(revision)) is None:
            self._refuse("RevisionNotFound")
        elif not (file := folder / name).is_file():
            self._refuse("EntryNotFound")
        else:
            headers = {
                "X-Repo-Commit": self.server.commit(folder),
                "ETag": f'"{digest(file)}"',
                "Accept-Ranges": "bytes",
            }
            content, status = file.read_bytes(), 200
            if asked_range := self.headers.get("Range"):
                first, _, last = asked_range.removeprefix("bytes=").partition("-")
                end = min(int(last) + 1 if last else len(content), len(content))
                headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
                content, status = content[int(first) : end], 206
            self._answer(status, content, headers)

    def _answer_json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: str) -> None:
        self._answer(404, b"", {"X-Error-Code": code})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):
                self.wfile.write(content)
