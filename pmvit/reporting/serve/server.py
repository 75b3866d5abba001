"""`serve`: a page on this machine where one drops an image and sees what a model and its original make of it.

Python's own server is enough for that, and a larger one (uvicorn with starlette) would not do with less code: it has no
limit for the size of a body either, nor for the time that one may take.
"""

import errno
import io
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pmvit.errors import PmvitError
from pmvit.reporting.page.templates import WEB, render
from pmvit.reporting.saved_model import SavedModel
from pmvit.reporting.serve.trial import Trial
from pmvit.reporting.serve.uploads import FORMATS, Limits, RefusedError, read_upload

HOST = "127.0.0.1"
FILES = {"/style.css": "text/css"} | dict.fromkeys(("/theme.js", "/viewer.js", "/serve.js"), "text/javascript")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SECONDS_TO_SEND = 30.0  # in which a request has to be here, however slowly it comes
MOST_WAITING = 16  # images, still packed, that may wait for the models at a time
MOST_DISCARDED = 1 << 30  # bytes of a refused file that are read all the same, so that its sender reads the answer

Answer = tuple[str, bytes]  # of which kind, and what


class Server(ThreadingHTTPServer):
    """A page to try a model, bound to a port of 127.0.0.1; each connection has a thread of its own. See `serve`.

    One image at a time is unpacked and goes through the models, so that memory holds one and the times mean something;
    always in the same thread, for what a thread frees is kept for that thread.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, saved: SavedModel, port: int, names: str | Path | None = None, limits: Limits | None = None
    ) -> None:
        if not 0 <= port <= 65535:
            raise PmvitError(f"port: expected a number from 0 to 65535, got {port}")
        self.limits = limits or Limits()
        said = {"limits": self.limits, "formats": FORMATS, "compared_with": saved.reference.title}
        self.page = render("serve.html", saved, [], **said).encode()
        self.trial = Trial(saved, names)
        self.work = ThreadPoolExecutor(1)
        self.waiting = threading.BoundedSemaphore(MOST_WAITING)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            reason = "it is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise PmvitError(f"port {port} of {HOST} cannot be had ({reason}): choose another, or 0 for any") from None

    def server_close(self) -> None:
        super().server_close()
        self.work.shutdown(cancel_futures=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever asked went away; what goes wrong here is answered (`_Handler._answer`)."""

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which it answers; a page that got another name to lead here is refused."""
        return (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}")


class _Incoming(io.RawIOBase):
    """What comes from a connection until `deadline`: one for all of a request, which single bytes do not put off."""

    deadline = 0.0

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of what is no request: even that gets a whole answer
    server_version, sys_version = "pmvit", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        self._incoming.deadline = time.monotonic() + SECONDS_TO_SEND
        super().handle_one_request()

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name in http.server
        """Nothing: who tries an image is nobody's business."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no request gets an answer like all others."""
        self.close_connection = True
        self._send(code, *_json({"error": message or HTTPStatus(code).phrase}))

    def _answer(self, work: Callable[[], Answer]) -> None:
        status: int = HTTPStatus.OK
        try:
            if self.headers.get("Host") not in self.server.hosts:
                raise RefusedError(HTTPStatus.FORBIDDEN, f"This page answers at {self.server.address} only.")
            kind, content = work()
        except Exception as error:  # a fault of ours must not end the server, and is said
            self.close_connection = True  # what else was sent is not read
            status, message = (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"The model failed on this image: {type(error).__name__}.",
            )
            if isinstance(error, RefusedError):
                status, message = error.status, str(error)
            kind, content = _json({"error": message})
        self._send(status, kind, content)

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.connection.settimeout(SECONDS_TO_SEND)
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _get(self) -> Answer:
        if self.path == "/":
            return "text/html; charset=utf-8", self.server.page
        if self.path in FILES:
            return f"{FILES[self.path]}; charset=utf-8", (WEB / self.path[1:]).read_bytes()
        raise RefusedError(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _post(self) -> Answer:
        if self.path != "/predict":
            raise RefusedError(HTTPStatus.NOT_FOUND, "There is no such page.")
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site")
        own = {f"http://{host}" for host in self.server.hosts}
        if (origin is not None and origin not in own) or site not in (None, "same-origin"):
            raise RefusedError(HTTPStatus.FORBIDDEN, "Images are taken from this page only.")
        if not self.server.waiting.acquire(blocking=False):
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "Too many images are waiting: try again in a moment.")
        try:
            return self.server.work.submit(self._tried, self._body()).result()
        finally:
            self.server.waiting.release()

    def _tried(self, content: bytes) -> Answer:
        return _json(self.server.trial.run(read_upload(content, self.server.limits)))

    def _body(self) -> bytes:
        said, most = set(self.headers.get_all("Content-Length", [])), self.server.limits.megabytes
        if not said or "Transfer-Encoding" in self.headers:
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "The length of the file is missing.")
        if len(said) > 1 or not re.fullmatch("[0-9]{1,15}", next(iter(said))):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "The length of the file is no number of bytes.")
        length = int(said.pop())
        if length > 1e6 * most:
            length = min(length, MOST_DISCARDED)
            with suppress(OSError):  # a browser sends all of it before it listens to the answer
                while length > 0 and (part := self.rfile.read(min(length, 1 << 20))):
                    length -= len(part)
            raise RefusedError(413, f"The file is larger than {most:g} MB: send a smaller one.")
        try:
            content = self.rfile.read(length)
        except TimeoutError:
            raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, "The file did not arrive in time.") from None
        if len(content) < length:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "The file did not arrive as a whole.")
        return content


def _json(value: Any) -> Answer:
    return "application/json", json.dumps(value).encode()


def serve(
    path: str | Path,
    *,
    port: int = 8000,
    original: str | Path | nn.Module | None = None,
    names: str | Path | None = None,
    limits: Limits | None = None,
    say: Callable[[str], Any] = print,
    device: str | torch.device = "cpu",
) -> None:
    """Start a local page to try a compressed model beside its original; it answers until it is interrupted.

    It is bound to 127.0.0.1, and answers to this machine's browser alone.

    Args:
        path: What `save` wrote.
        port: To answer at; 0 for any that is free.
        original: A saved model, or a model, to compare with; if not given, the one this was made of, if it is there.
        names: A text file with the names of the classes, one a line.
        limits: How large images may be.
        say: Gets the address in a sentence, once the page answers.
        device: Where both models compute.

    Raises:
        PmvitError: If the model cannot be loaded, or the port is taken.
    """
    with Server(SavedModel(Path(path), original, device), port, names, limits) as server:
        try:
            say(f"try it at {server.address} (Ctrl-C ends it)")
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")
