"""A hub on this machine, which speaks as much of the protocol of the Hugging Face Hub as its client asks for here."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_somebody"  # noqa: S105  # opens nothing else


@dataclass
class Repo:
    """A repository: what each branch or commit holds, and who may read it."""

    private: bool = False
    gated: bool = False
    revisions: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: dict[str, str] = field(default_factory=dict)  # of the branches

    def files(self, revision: str) -> dict[str, bytes] | None:
        return self.revisions.get(revision)

    def commit(self, branch: str) -> str:
        """The name of what a branch holds; a commit is its own."""
        if branch not in self.commits:
            content = {name: hashlib.sha1(data).hexdigest() for name, data in self.revisions[branch].items()}  # noqa: S324
            oid = hashlib.sha1(json.dumps(sorted(content.items())).encode()).hexdigest()  # noqa: S324
            self.commits[branch] = self.commits[oid] = oid
            self.revisions[oid] = dict(self.revisions[branch])
        return self.commits[branch]

    def write(self, branch: str, change: dict[str, bytes | None]) -> str:
        held = {**self.revisions[branch], **change}
        self.revisions[branch] = {name: data for name, data in held.items() if data is not None}
        self.commits.pop(branch, None)
        return self.commit(branch)


class Hub:
    """Repositories by name, what was sent, and what is to go wrong.

    Attributes:
        asked: Method and path of every request, in order.
        cut_after: Bytes after which the next answer with more of them breaks off; 0 for none.
        told_sizes: Sizes that are told of files in place of the true ones, by their name.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.ranges: list[str] = []
        self.cut_after = 0
        self.told_sizes: dict[str, int] = {}
        self.url = ""

    def count(self, method: str, part: str) -> int:
        """How many requests there were whose path has a part."""
        return sum(each == method and part in path for each, path in self.asked)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers on a port of this machine."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """What a process needs to take this for the hub. The client reads it when it is imported."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",  # a protocol of its own, to other servers
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def _answer(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        cut = self.hub.cut_after if self.command == "GET" and 0 < self.hub.cut_after < len(data) else None
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])
        if cut is not None:
            self.hub.cut_after = 0
            self.close_connection = True

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self._answer(status, {"error": message or code}, **{"X-Error-Code": code, "X-Error-Message": message or code})

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        self.query = parse_qs(urlsplit(self.path).query)
        self.sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for method, pattern, answer in _ROUTES:
            if self.command in method and (match := re.fullmatch(pattern, path)):
                answer(self, **match.groupdict())
                return
        self._refuse(404, "EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

    def _may(self, repo: str, *, write: bool = False) -> Repo | None:
        """The repository, if who asks may read or write it; else the refusal is sent."""
        found, token = self.hub.repos.get(repo), self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif found is None or (found.private and token != TOKEN):
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif write and token != TOKEN:
            self._refuse(401, "", "Invalid username or password.")
        elif write and not repo.startswith("me/"):
            self._refuse(403, "", "You have no rights to write here")
        else:
            return found
        return None

    def alive(self) -> None:
        self._answer(200)

    def create(self) -> None:
        data = json.loads(self.sent)
        name = f"{data['organization']}/{data['name']}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "", "Invalid username or password.")
        elif not name.startswith("me/"):
            self._refuse(403, "", "You have no rights to make repositories here")
        elif name in self.hub.repos:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
        else:
            self.hub.repos[name] = Repo(private=data.get("visibility") == "private")
            self.hub.repos[name].write("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
            self._answer(200, {"url": f"{self.hub.url}/{name}"})

    def info(self, repo: str, revision: str | None = None) -> None:
        if (found := self._may(repo)) is None:
            return None
        revision = revision or "main"
        if (files := found.files(revision)) is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        sizes = {name: self.hub.told_sizes.get(name, len(data)) for name, data in files.items()}
        siblings = [{"rfilename": name, "size": size, "blobId": name} for name, size in sizes.items()]
        about = {"_id": "1", "id": repo, "private": found.private, "tags": [], "downloads": 0, "likes": 0}
        return self._answer(200, {**about, "sha": found.commit(revision), "siblings": siblings})

    def tree(self, repo: str, revision: str) -> None:
        if (found := self._may(repo)) is not None:
            files = found.files(revision) or {}
            rows = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files.items()]
            self._answer(200, rows)

    def branch(self, repo: str, name: str) -> None:
        if (found := self._may(repo, write=True)) is None:
            return None
        if name in found.revisions:
            return self._refuse(409, "", "Reference already exists")
        found.revisions[name] = dict(found.revisions["main"])
        return self._answer(200, {})

    def validate(self) -> None:
        self._answer(200, {"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        if self._may(repo, write=True) is not None:
            names = [file["path"] for file in json.loads(self.sent)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            rows = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self._answer(200, {"files": rows})

    def batch(self, repo: str) -> None:
        if self._may(repo, write=True) is None:
            return
        objects = json.loads(self.sent)["objects"]
        for each in objects:
            if each["oid"] not in self.hub.large:  # what is there already need not be sent
                each["actions"] = {"upload": {"href": f"{self.hub.url}/large/{each['oid']}"}}
        self._answer(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.sent).hexdigest() == oid:
            self.hub.large[oid] = self.sent
            return self._answer(200)
        return self._refuse(400, "", "the content is another")

    def commit(self, repo: str, revision: str) -> None:
        if (found := self._may(repo, write=True)) is None:
            return
        change: dict[str, bytes | None] = {}
        for line in map(json.loads, self.sent.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                change[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                change[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                change[value["path"]] = None
        oid = found.write(revision, change)
        self._answer(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}"})

    def file(self, repo: str, revision: str, name: str) -> None:
        if (found := self._may(repo)) is None:
            return None
        if found.gated:
            return self._refuse(403, "GatedRepo", f"Access to model {repo} is restricted")
        if (files := found.files(revision)) is None:
            return self._refuse(404, "RevisionNotFound")
        if name not in files:
            return self._refuse(404, "EntryNotFound")
        data = files[name]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": found.commit(revision)}
        if (asked := self.headers.get("Range")) is not None:
            self.hub.ranges.append(asked)
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            told = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            return self._answer(206, data[begin:], **headers, Content_Range=told)
        return self._answer(200, data, **headers, Accept_Ranges="bytes")


_REPO, _REVISION = r"(?P<repo>[\w.-]+/[\w.-]+)", r"(?P<revision>[^/]+)"
_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET HEAD", "/?", _Handler.alive),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("GET", f"/api/models/{_REPO}", _Handler.info),
    ("GET", f"/api/models/{_REPO}/revision/{_REVISION}", _Handler.info),
    ("GET", f"/api/models/{_REPO}/tree/{_REVISION}", _Handler.tree),
    ("POST", f"/api/models/{_REPO}/branch/(?P<name>[^/]+)", _Handler.branch),
    ("POST", f"/api/models/{_REPO}/preupload/{_REVISION}", _Handler.preupload),
    ("POST", f"/api/models/{_REPO}/commit/{_REVISION}", _Handler.commit),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/large/(?P<oid>[0-9a-f]+)", _Handler.put),
    ("GET HEAD", f"/{_REPO}/resolve/{_REVISION}/(?P<name>.+)", _Handler.file),
]
