"""A loopback server that behaves like the Hugging Face Hub, its CDN and a plain web server, faults included."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_a-token-that-must-never-be-shown"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIGNATURE = "a-signature-that-must-never-be-shown"


@dataclass
class Fault:
    """What happens to the next `times` requests of a path."""

    times: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    break_after: int | None = None


@dataclass
class HubServer:
    """`repos` maps 'datasets/org/name' to files; `pages` holds plain web pages by path."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    lfs: set[str] = field(default_factory=set)
    pages: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    page_size: int = 1000
    ranges: bool = True
    heads: bool = True
    etags: bool = True
    lengths: bool = True
    url: str = ""
    cdn_url: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    tokens_at_cdn: list[str | None] = field(default_factory=list)
    private: set[str] = field(default_factory=set)
    """Repositories that were created private."""
    uploaded: dict[str, bytes] = field(default_factory=dict)
    """Large objects that were uploaded, by SHA-256, whether a commit names them or not."""
    commits: list[str] = field(default_factory=list)
    """The messages of the commits that were made."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, text: str) -> int:
        return sum(number for request, number in self.requests.items() if text in request)

    def take_fault(self, path: str) -> Fault | None:
        with self.lock:
            fault = self.faults.get(path)
            if fault is None or fault.times == 0:
                return None
            fault.times -= 1
            return fault


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that leave in the middle are part of these tests."""


@contextmanager
def running() -> Iterator[HubServer]:
    hub = HubServer()
    servers = [_Server(("127.0.0.1", 0), _handler(hub, cdn=cdn)) for cdn in (False, True)]
    hub.url, hub.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


def _is_large(file: dict[str, Any]) -> bool:
    return file["path"].endswith((".safetensors", ".gguf"))


def _handler(hub: HubServer, *, cdn: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def do_PUT(self) -> None:
            self.answer()

        def answer(self) -> None:
            parts = urlsplit(self.path)
            path = unquote(parts.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with hub.lock:
                hub.requests[f"{'CDN ' if cdn else ''}{self.command} {path}"] += 1
            if self.command == "HEAD" and not hub.heads:
                return self.refuse(405)
            fault = hub.take_fault(path)
            if fault is not None and fault.status:
                return self.refuse(fault.status, **fault.headers)
            if path.startswith("/upload/"):
                return self.keep_object(path, body)
            if path.endswith("/info/lfs/objects/batch"):
                return self.offer_uploads(json.loads(body))
            if path == "/api/validate-yaml":
                return self.json({"errors": [], "warnings": []})
            if path == "/api/repos/create":
                return self.create(json.loads(body))
            if cdn:
                hub.tokens_at_cdn.append(self.headers.get("Authorization"))
                assert parts.query == f"Signature={SIGNATURE}"
                return self.send(hub.pages[path], fault)
            if path in hub.pages:
                return self.send(hub.pages[path], fault)
            if path.startswith("/api/"):
                return self.api(path, parse_qs(parts.query), body)
            if "/resolve/" in path:
                return self.resolve(path, fault)
            return self.refuse(404)

        def may_read(self, name: str) -> bool:
            token = self.headers.get("Authorization")
            if token not in (None, f"Bearer {TOKEN}"):
                self.refuse(401, **{"X-Error-Message": "Invalid credentials in Authorization header"})
            elif name not in hub.repos:
                self.refuse(401 if token is None else 404, **{"X-Error-Code": "RepoNotFound"})
            elif name in hub.gated:
                self.refuse(401 if token is None else 403, **{"X-Error-Code": "GatedRepo"})
            else:
                return True
            return False

        def create(self, body: dict[str, Any]) -> None:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.refuse(401, **{"X-Error-Message": "Invalid username or password."})
            name = f"{body['organization']}/{body['name']}"
            if name not in hub.repos and (body.get("private") or body.get("visibility") == "private"):
                hub.private.add(name)
            status = 409 if name in hub.repos else 200
            hub.repos.setdefault(name, {})
            return self.json({"url": f"{hub.url}/{name}", "id": name}, status=status)

        def offer_uploads(self, body: dict[str, Any]) -> None:
            """Answer as Git LFS: where to put each object; nothing where it is there."""
            objects = []
            for wanted in body["objects"]:
                offer = {"oid": wanted["oid"], "size": wanted["size"]}
                if wanted["oid"] not in hub.uploaded:
                    offer["actions"] = {"upload": {"href": f"{hub.url}/upload/{wanted['oid']}"}}
                objects.append(offer)
            return self.json({"transfer": "basic", "objects": objects})

        def keep_object(self, path: str, body: bytes) -> None:
            oid = path.removeprefix("/upload/")
            if hashlib.sha256(body).hexdigest() != oid:
                return self.refuse(400)
            hub.uploaded[oid] = body
            return self.refuse(200)

        def commit(self, name: str, body: bytes) -> None:
            """Take a commit: a header, files in Base64, and large objects by their hash."""
            files = dict(hub.repos[name])
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "header":
                    hub.commits.append(value["summary"])
                elif entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    if value["oid"] not in hub.uploaded:
                        return self.refuse(400)
                    files[value["path"]] = hub.uploaded[value["oid"]]
                    hub.lfs.add(value["path"])
            hub.repos[name] = files
            return self.json({"commitOid": COMMIT, "commitUrl": f"{hub.url}/{name}/commit/{COMMIT}"})

        def api(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
            kind, org, repo, *rest = path.removeprefix("/api/").split("/")
            name = f"{org}/{repo}" if kind == "models" else f"{kind}/{org}/{repo}"
            if not self.may_read(name):
                return
            what, revision = (*rest, "", "")[:2]
            if revision not in ("", "main", COMMIT):
                return self.refuse(404, **{"X-Error-Code": "RevisionNotFound"})
            if what in ("", "revision"):
                return self.json({"id": f"{org}/{repo}", "sha": COMMIT, "siblings": []})
            if what in ("preupload", "commit") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.refuse(403)
            if what == "preupload":
                entries = [
                    {"path": file["path"], "shouldIgnore": False, "uploadMode": "lfs" if _is_large(file) else "regular"}
                    for file in json.loads(body)["files"]
                ]
                return self.json({"files": entries})
            if what == "commit":
                return self.commit(name, body)
            files = hub.repos[name]
            if what == "paths-info":
                wanted = parse_qs(body.decode())["paths"]
                return self.json([self.entry(each, files[each]) for each in wanted if each in files])
            folder = "/".join(rest[2:])
            names = sorted(each for each in files if not folder or each.startswith(folder + "/"))
            if folder and not names:
                return self.refuse(404, **{"X-Error-Code": "EntryNotFound"})
            start = int(query.get("cursor", ["0"])[0])
            page = names[start : start + hub.page_size]
            link = {}
            if start + hub.page_size < len(names):
                following = f"{hub.url}{path}?recursive=true&cursor={start + hub.page_size}"
                link = {"Link": f'<{following}>; rel="next"'}
            entries = [self.entry(each, files[each]) for each in page]
            return self.json([{"type": "directory", "oid": "d", "path": "folder", "size": 0}, *entries], **link)

        def entry(self, path: str, data: bytes) -> dict[str, object]:
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            found: dict[str, object] = {"type": "file", "oid": git, "size": len(data), "path": path}
            if path in hub.lfs:
                found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            return found

        def resolve(self, path: str, fault: Fault | None) -> None:
            name, _, rest = path[1:].partition("/resolve/")
            revision, _, file = rest.partition("/")
            if not self.may_read(name):
                return
            assert revision == COMMIT
            data = hub.repos[name].get(file)
            if data is None:
                return self.refuse(404, **{"X-Error-Code": "EntryNotFound"})
            if file not in hub.lfs:
                return self.send(data, fault)
            hub.pages[f"/cdn/{name}/{file}"] = data
            location = f"{hub.cdn_url}/cdn/{name}/{file}?Signature={SIGNATURE}"
            return self.refuse(302, Location=location)

        def send(self, data: bytes, fault: Fault | None) -> None:
            start, end, status = 0, len(data), 200
            asked = self.headers.get("Range")
            if asked and hub.ranges:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, end, status = int(first), min(len(data), int(last) + 1) if last else len(data), 206
                if start >= len(data):
                    return self.refuse(416, **{"Content-Range": f"bytes */{len(data)}"})
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
            self.send_header("Last-Modified", "Sun, 01 Nov 2026 00:00:00 GMT")
            if hub.etags:
                self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
            body = data[start:end]
            if hub.lengths:
                self.send_header("Content-Length", str(len(body)))
            else:
                self.send_header("Transfer-Encoding", "chunked")
                body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            self.end_headers()
            if self.command == "HEAD":
                return
            if fault is not None and fault.break_after is not None:
                self.wfile.write(body[: fault.break_after])
                self.wfile.flush()
                self.close_connection = True
                return
            self.wfile.write(body)

        def json(self, value: object, status: int = 200, **headers: str) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name, text)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def refuse(self, status: int, **headers: str) -> None:
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name, text)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler
