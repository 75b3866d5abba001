"""The local page's server: what it takes, what it refuses, and several users at once."""

import http.client
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import pmvit
from pmvit.errors import PmvitError
from pmvit.reporting.saved_model import SavedModel
from pmvit.reporting.serve import server as serving
from pmvit.reporting.serve.server import MOST_WAITING, Server
from pmvit.reporting.serve.trial import Trial
from pmvit.reporting.serve.uploads import Limits, RefusedError, read_upload
from tests.helpers import small_plan
from tests.reporting.pages import save_demo
from tests.segmenters import small_segmenter


def png(width: int = 40, height: int = 30) -> bytes:
    stream = io.BytesIO()
    Image.effect_noise((width, height), 80).convert("RGB").save(stream, "PNG")
    return stream.getvalue()


def head_of_png(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(SavedModel(save_demo(tmp_path_factory.mktemp("model") / "out")), 0, limits=Limits(0.5, 2.0))
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def ask(server: Server, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    is_json = response.headers["Content-Type"] == "application/json"
    return response.status, json.loads(content) if is_json else content.decode(), response.headers


def test_an_image_gets_both_answers_and_their_times(server: Server) -> None:
    status, answer, _ = ask(server, "POST", "/predict", png())
    assert status == 200
    assert answer["kind"] == "classes"
    for side in ("original", "compressed"):
        shares = [one["share"] for one in answer[side]]
        assert shares == sorted(shares, reverse=True)
        assert len(shares) == 5
        assert answer["seconds"][side] > 0
    assert answer["picture"].startswith("data:image/png;base64,")


def test_what_is_refused_and_how_it_is_said(server: Server) -> None:
    refused = {
        b"": (400, "empty"),
        b"%PDF-1.7 not an image": (415, "no image that can be read"),
        png()[:300]: (422, "broken"),
        head_of_png(3000, 1000): (413, "more than 2 million pixels"),
        head_of_png(60000, 60000): (413, "more than 2 million pixels"),
        png() + bytes(600_000): (413, "larger than 0.5 MB"),
    }
    for content, (status, words) in refused.items():
        found, answer, _ = ask(server, "POST", "/predict", content)
        assert (found, words in answer["error"]) == (status, True), answer
        assert answer["error"].count(".") <= 2
    port = server.server_port
    assert ask(server, "GET", "/", Host=f"evil.example:{port}")[0] == 403
    assert ask(server, "POST", "/predict", png(), Origin="http://evil.example")[0] == 403
    assert ask(server, "POST", "/predict", png(), Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(server, "GET", "/../server.py")[0] == 404
    assert ask(server, "POST", "/predict", png(), Origin=f"http://localhost:{port}", Host=f"localhost:{port}")[0] == 200


def test_the_page_may_load_nothing_from_elsewhere(server: Server) -> None:
    status, text, headers = ask(server, "GET", "/")
    assert status == 200
    assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert "http://" not in text
    for name in ("style.css", "theme.js", "viewer.js", "serve.js"):
        assert ask(server, "GET", f"/{name}")[0] == 200


def test_several_users_at_once_each_get_their_own_answer(server: Server) -> None:
    contents = [png(40 + number, 30) for number in range(6)]
    alone = [ask(server, "POST", "/predict", content)[1]["original"] for content in contents]
    with ThreadPoolExecutor(6) as users:
        together = list(users.map(lambda content: ask(server, "POST", "/predict", content), contents))
    assert [status for status, _, _ in together] == [200] * 6
    assert [answer["original"] for _, answer, _ in together] == alone
    taken = [server.waiting.acquire(blocking=False) for _ in range(MOST_WAITING)]
    try:
        assert all(taken)
        status, answer, _ = ask(server, "POST", "/predict", png())
        assert (status, "try again" in answer["error"]) == (503, True)
    finally:
        for _ in taken:
            server.waiting.release()


def send(server: Server, *parts: bytes, pause: float = 0.0) -> bytes:
    """What a connection answers to bytes that come in parts, until it is closed."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        with suppress(OSError):
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        answer = b""
        with suppress(OSError):
            while part := connection.recv(1 << 16):
                answer += part
    return answer


def begun(server: Server, *lines: str) -> bytes:
    """The head of a request that sends an image."""
    return "\r\n".join(["POST /predict HTTP/1.1", f"Host: 127.0.0.1:{server.server_port}", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([f"Content-Length: {'9' * 5000}"], 400),
        (["Content-Length: -5"], 400),
        (["Content-Length: 5e3"], 400),
        (["Content-Length: +7"], 400),
        (["Content-Length: 7", "Content-Length: 8"], 400),
        ([], 411),
        (["Transfer-Encoding: chunked"], 411),
        (["Content-Length: 7", "Transfer-Encoding: chunked"], 411),
    ],
)
def test_a_length_that_is_none_is_refused(server: Server, lines: list[str], status: int) -> None:
    answer = send(server, begun(server, *lines))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b'{"error": "The length of the file' in answer


def test_what_is_no_request_is_answered_like_the_others(server: Server) -> None:
    for request, status in ((b"nonsense\r\n\r\n", b"400"), (b"BREW / HTTP/1.1\r\n\r\n", b"501")):
        answer = send(server, request)
        assert status in answer.partition(b"\r\n")[0]
        assert b"Content-Security-Policy" in answer
        assert answer.rstrip().endswith(b"}")


def test_slow_requests_end_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SECONDS_TO_SEND", 0.6)
    drops = [b"x"] * 30  # each of them in time, all of them not
    start = time.monotonic()
    answer = send(server, begun(server, "Content-Length: 1000"), *drops, pause=0.1)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert send(server, b"POST /pre", *drops, pause=0.1) == b""  # not even the head of a request: the end
    assert time.monotonic() - start < 15
    assert send(server, begun(server, "Content-Length: 1000") + b"x" * 10, pause=0.0).startswith(b"HTTP/1.1 408 ")


def test_one_image_at_a_time_is_unpacked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most = threading.BoundedSemaphore(1), []

    def watched(content: bytes, limits: Limits) -> Image.Image:
        alone = at_once.acquire(blocking=False)
        most.append(alone)
        time.sleep(0.05)
        try:
            return read_upload(content, limits)
        finally:
            if alone:
                at_once.release()

    monkeypatch.setattr(serving, "read_upload", watched)
    with ThreadPoolExecutor(6) as users:
        found = list(users.map(lambda _: ask(server, "POST", "/predict", png())[0], range(6)))
    assert (found, most) == ([200] * 6, [True] * 6)


def test_whoever_goes_away_leaves_no_traceback(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    reset = struct.pack("ii", 1, 0)  # the connection is reset, not ended
    for request in (begun(server, "Content-Length: 1000"), begun(server, f"Content-Length: {len(png())}") + png()):
        for content in (request, request[: len(request) // 2]):
            with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                connection.sendall(content)
    assert ask(server, "POST", "/predict", png())[0] == 200
    time.sleep(0.3)
    assert capfd.readouterr() == ("", "")


def test_sixteen_bits_are_scaled() -> None:
    stream = io.BytesIO()
    Image.fromarray(np.full((8, 8), 128 * 257, np.uint16)).save(stream, "PNG")
    assert read_upload(stream.getvalue(), Limits()).getpixel((0, 0)) == (128, 128, 128)


def test_a_taken_port_and_a_sideways_photograph(server: Server, tmp_path: Path) -> None:
    folder = save_demo(tmp_path / "out")
    with pytest.raises(PmvitError, match=f"port {server.server_port} of 127.0.0.1 cannot be had .it is in use."):
        Server(SavedModel(folder), server.server_port)
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (40, 20)).save(stream, "JPEG", exif=exif)
    assert read_upload(stream.getvalue(), Limits()).size == (20, 40)
    with pytest.raises(RefusedError):
        read_upload(b"", Limits())


def test_a_segmenter_answers_with_pictures(tmp_path: Path) -> None:
    model = small_segmenter()
    pmvit.save(pmvit.compress(model, small_plan(model)), tmp_path / "out")
    answer = Trial(SavedModel(tmp_path / "out")).run(Image.effect_noise((120, 70), 80).convert("RGB"))
    assert answer["kind"] == "pixels"
    assert 0 <= answer["agreement"] <= 1
    assert {one["name"] for one in answer["classes"]} <= {"class 0", "class 1", "class 2"}
    for name in ("original", "compressed", "difference"):
        assert answer[name].startswith("data:image/jpeg")


def test_the_command_prints_its_address_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    folder = save_demo(tmp_path / "out")
    command = [sys.executable, "-u", "-m", "pmvit", "serve", str(folder), "--port", "0"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a job in the background lacks
    with subprocess.Popen(command, **options) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "try it at http://127.0.0.1:" in line
        os.kill(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors, "ended" in out) == (0, "", True)
