"""A web server of this machine for the tests of addresses: one that answers for parts of files, and can fail."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class WebServer(ThreadingHTTPServer):
    """Serves the files of a folder.

    Attributes:
        ranges: whether it answers for parts of files.
        failures: answers 503 this many times more.
        faults: "busy" (503) or "whole" (the whole file instead of a part), by the number of the request, from 1.
        silent: tells neither size nor version of a file.
        cut: sends this share of a body and hangs up.
        requests: answered, by path.
        bytes_sent: of bodies.
    """

    daemon_threads = True

    def __init__(self, folder: Path, ranges: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.ranges = folder, ranges
        self.failures, self.cut, self.bytes_sent = 0, 1.0, 0
        self.faults: dict[int, str] = {}
        self.silent = False
        self.requests: Counter[str] = Counter()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def web_server(folder: Path, ranges: bool = True) -> Iterator[WebServer]:
    server = WebServer(folder, ranges)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    server: WebServer

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, directory=str(args[2].folder))

    def do_GET(self) -> None:
        self._answer(super().do_GET, with_body=True)

    def do_HEAD(self) -> None:
        self._answer(super().do_HEAD, with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _answer(self, of_folder: Any, with_body: bool) -> None:
        self.server.requests[self.path.split("?")[0]] += 1
        fault = self.server.faults.pop(self.server.requests.total(), None)
        if self.server.failures > 0 or fault == "busy":
            self.server.failures -= fault is None
            self.send_error(503)
            return
        file = Path(self.translate_path(self.path))
        if not file.is_file():
            of_folder()
            return
        content = file.read_bytes()
        asked = self.headers.get("Range") if self.server.ranges and fault is None else None
        first, last = 0, len(content) - 1
        if asked:
            first, last = (int(end) for end in asked.removeprefix("bytes=").split("-"))
            last = min(last, len(content) - 1)
        if first > last:
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        elif not self.server.ranges and not self.server.silent:
            self.send_header("ETag", f'"{hash(content)}"')
        if not self.server.silent:
            self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if with_body:
            body = content[first : last + 1]
            body = body[: int(len(body) * self.server.cut)]
            self.server.bytes_sent += len(body)
            with suppress(ConnectionError):  # who asked has heard enough
                self.wfile.write(body)
