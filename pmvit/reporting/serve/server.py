"""`serve`: a page on this machine where one drops an image and sees what a model and its original make of it."""

import errno
import json
import threading
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pmvit.errors import PmvitError
from pmvit.reporting.page.templates import WEB, environment, viewer_data
from pmvit.reporting.saved_model import open_saved
from pmvit.reporting.serve.trial import Trial
from pmvit.reporting.serve.uploads import FORMATS, Limits, RefusedError, read_upload
from pmvit.saving.commands import versions

HOST = "127.0.0.1"
FILES = {
    "/style.css": "text/css; charset=utf-8",
    "/theme.js": "text/javascript; charset=utf-8",
    "/viewer.js": "text/javascript; charset=utf-8",
    "/serve.js": "text/javascript; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SECONDS_TO_SEND = 30  # a connection that is silent for longer is closed
MOST_WAITING = 16  # images that may wait for the models at a time
MOST_DISCARDED = 1 << 30  # bytes of a refused file that are read all the same, so that its sender reads the answer


class Server(ThreadingHTTPServer):
    """Answers on 127.0.0.1, each connection in a thread of its own."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, trial: Trial, page: str, limits: Limits, port: int) -> None:
        self.trial = trial
        self.page = page.encode()
        self.limits = limits
        self.waiting = threading.BoundedSemaphore(MOST_WAITING)
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which it answers; a page that got another name to lead here is refused."""
        return (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}")


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "pmvit", ""
    timeout = SECONDS_TO_SEND

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name in http.server
        """Nothing: who tries an image is nobody's business."""

    def _answer(self, work: Any) -> None:
        try:
            if self.headers.get("Host") not in self.server.hosts:
                raise RefusedError(HTTPStatus.FORBIDDEN, f"This page answers at {self.server.address} only.")
            status, kind, content = work()
        except RefusedError as error:
            self.close_connection = True  # what else was sent is not read
            status, kind, content = error.status, "application/json", _json({"error": str(error)})
        except Exception as error:  # a fault of ours must not end the server, and is said
            self.close_connection = True
            message = f"The model failed on this image: {type(error).__name__}."
            status, kind, content = HTTPStatus.INTERNAL_SERVER_ERROR, "application/json", _json({"error": message})
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _get(self) -> tuple[int, str, bytes]:
        if self.path == "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", self.server.page
        if self.path in FILES:
            return HTTPStatus.OK, FILES[self.path], (WEB / self.path[1:]).read_bytes()
        raise RefusedError(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _post(self) -> tuple[int, str, bytes]:
        if self.path != "/predict":
            raise RefusedError(HTTPStatus.NOT_FOUND, "There is no such page.")
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site")
        own = {f"http://{host}" for host in self.server.hosts}
        if (origin is not None and origin not in own) or site not in (None, "same-origin"):
            raise RefusedError(HTTPStatus.FORBIDDEN, "Images are taken from this page only.")
        if not self.server.waiting.acquire(blocking=False):
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "Too many images are waiting: try again in a moment.")
        try:
            picture = read_upload(self._body(), self.server.limits)
            return HTTPStatus.OK, "application/json", _json(self.server.trial.run(picture))
        finally:
            self.server.waiting.release()

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "The length of the file is missing.")
        limits = self.server.limits
        if int(length) > limits.bytes:
            self._discard(min(int(length), MOST_DISCARDED))
            raise RefusedError(413, f"The file is larger than {limits.megabytes:g} MB: send a smaller one.")
        try:
            return self.rfile.read(int(length))
        except TimeoutError:
            raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, "The file did not arrive in time.") from None

    def _discard(self, length: int) -> None:
        """Read what a browser sends before it listens to the answer, and keep none of it."""
        with suppress(OSError):
            while length > 0 and (part := self.rfile.read(min(length, 1 << 20))):
                length -= len(part)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def make_server(
    path: str | Path,
    *,
    port: int = 8000,
    original: str | Path | nn.Module | None = None,
    names: str | Path | None = None,
    limits: Limits | None = None,
    device: str | torch.device = "cpu",
) -> Server:
    """Load a model and bind its page to a port; `serve_forever` of the result then answers.

    Raises:
        PmvitError: If the model cannot be loaded, or the port is taken.
    """
    if not 0 <= port <= 65535:
        raise PmvitError(f"port: expected a number from 0 to 65535, got {port}")
    limits = limits or Limits()
    saved = open_saved(Path(path), original, device)
    page = (
        environment()
        .get_template("serve.html")
        .render(
            title=saved.config["model"]["architecture"],
            limits=limits,
            formats=FORMATS,
            compared_with=saved.reference.title,
            no_blocks=saved.no_blocks,
            viewer=viewer_data(saved.blocks, saved.model, []) if saved.blocks is not None else None,
            versions=versions(),
        )
    )
    make = partial(Server, Trial(saved, names), page, limits)
    try:
        return make(port)
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise PmvitError(f"port {port} of {HOST} cannot be had ({reason}): choose another, or 0 for any") from None


def serve(
    path: str | Path,
    *,
    port: int = 8000,
    original: str | Path | nn.Module | None = None,
    names: str | Path | None = None,
    limits: Limits | None = None,
    say: Any = print,
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
    server = make_server(path, port=port, original=original, names=names, limits=limits, device=device)
    with server:
        try:
            say(f"try it at {server.address} (Ctrl-C ends it)")
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")
