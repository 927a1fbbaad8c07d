"""A proxy before a real MLflow server that does wrong what a test asks for: answers errors, is slow, cuts connections."""

import http.client
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Fault:
    """What is done to requests whose path contains `only`."""

    only: str = ""
    is_rank_zero: bool = False
    """Only to the first request to each path."""
    status: int = 0
    """This answer in place of the server's."""
    body: str = "trouble"
    delay_seconds: float = 0.0
    is_cut: bool = False
    """The connection ends in the middle of the answer, after the server did what was asked."""
    is_held: bool = False
    """The connection ends without an answer; the request reaches the server at `Proxy.release`."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Proxy(ThreadingHTTPServer):
    """In a thread; `fault` may be set at any time, `met` counts the requests that met it."""

    daemon_threads = True

    def __init__(self, port: int, certificate: Path | None = None, own_port: int = 0) -> None:
        super().__init__(("127.0.0.1", own_port), _Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.uri = f"{'http' if certificate is None else 'https'}://127.0.0.1:{self.server_address[1]}"
        self.fault: Fault | None = None
        self.met = 0
        self._port = port
        self._held: list[Request] = []
        self._seen: set[tuple[str, str]] = set()

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up, or does not trust the certificate, is part of the tests."""

    def set_fault(self, fault: Fault | None) -> None:
        self.fault, self.met, self._seen = fault, 0, set()

    def fault_of(self, request: Request) -> Fault | None:
        """What is to be done to this request."""
        if self.fault is None or self.fault.only not in request.path:
            return None
        place = (request.method, request.path.partition("?")[0])
        if self.fault.is_rank_zero and place in self._seen:
            return None
        self._seen.add(place)
        return self.fault

    def forward(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request(request.method, request.path, request.body, request.headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), body

    def hold(self, request: Request) -> None:
        self._held.append(request)

    def release(self) -> int:
        """Does now what was held back; how many requests that were."""
        held, self._held = self._held, []
        for request in held:
            assert self.forward(request)[0] == 200
        return len(held)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, format: str, *arguments: object) -> None:
        """Not to the terminal."""

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        request = Request(self.command, self.path, headers, body)
        fault = self.server.fault_of(request)
        if fault is None:
            self._answer(*self.server.forward(request))
            return
        time.sleep(fault.delay_seconds)
        if fault.is_held:
            self.server.hold(request)
            self._cut()
        elif fault.status:
            self._answer(fault.status, {"Retry-After": "1"}, fault.body.encode())
        else:
            status, headers, body = self.server.forward(request)
            self._answer(status, headers, body, keep=0.5 if fault.is_cut else 1.0)
        self.server.met += 1

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _any

    def _answer(self, status: int, headers: dict[str, str], body: bytes, keep: float = 1.0) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        self.send_header("Content-Length", headers.get("Content-Length", "0") if is_head else str(len(body)))
        self.end_headers()
        if is_head:
            return
        self.wfile.write(body[: int(len(body) * keep)])
        if keep < 1:
            self._cut()

    def _cut(self) -> None:
        """A reset, not an orderly end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
