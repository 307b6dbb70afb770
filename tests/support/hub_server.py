"""A Hugging Face hub of a few files on localhost, speaking the part of its HTTP API that huggingface_hub uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


def _handler(repos: Mapping[str, Mapping[str, bytes]], asked: list[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            asked.append(f"{self.command} {path}")
            parts = path.split("/")
            if parts[:2] == ["api", "models"]:
                self._api("/".join(parts[2:4]), parts[4])
            elif len(parts) >= 5 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), "/".join(parts[4:]), body)
            else:
                self._send(404, b"", {})

        def _api(self, repo: str, what: str) -> None:
            if repo not in repos:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            files = [{"type": "file", "path": n, "size": len(c), "oid": "0"} for n, c in repos[repo].items()]
            info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in repos[repo]]}
            self._send(200, json.dumps(files if what == "tree" else info).encode(), {})

        def _file(self, repo: str, name: str, body: bool) -> None:
            content = repos.get(repo, {}).get(name)
            if content is None:
                code = "EntryNotFound" if repo in repos else "RepoNotFound"
                self._send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})
                return
            tag = hashlib.sha256(content).hexdigest()
            self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, body)

        def _send(self, status: int, content: bytes, headers: Mapping[str, str], body: bool = True) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body and self.command != "HEAD":
                self.wfile.write(content)

    return Handler


@contextmanager
def hub_server(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the list of what was asked so far."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(repos, asked))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
