"""As much of a W&B server as a run, a sync and a report need, on the loopback device: it keeps what it is sent.

It knows nothing of what the numbers mean.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ENTITY = "team"
KEY = "0123456789" * 4  # any forty characters


class Stub:
    """A server that listens from construction on until `close`. `runs`: what each run sent, by its id."""

    def __init__(self) -> None:
        self.runs: dict[str, dict] = defaultdict(lambda: {"history": [], "summary": {}, "config": {}, "upsert": {}, "exit": None})
        self.operations: list[str] = []
        self.uploads: dict[str, bytes] = {}
        self.artifacts: list[dict] = []
        self.views: list[dict] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, query: str, variables: dict) -> dict:
        """The data of one GraphQL operation."""
        match = re.search(r"\b(?:query|mutation)\s+(\w+)", query)
        name = match[1] if match else ""
        self.operations.append(name)
        known = getattr(self, f"_{name}", None)
        return {} if known is None else known(variables)

    def _Viewer(self, variables: dict) -> dict:
        teams = {"edges": [{"node": {"name": ENTITY}}]}
        return {"viewer": {"id": "u", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": teams}}

    def _GetDefaultEntity(self, variables: dict) -> dict:
        return self._Viewer(variables)

    def _UpsertBucket(self, variables: dict) -> dict:
        run = self.runs[variables["name"]]
        run["upsert"] |= {key: value for key, value in variables.items() if value is not None}
        if variables.get("config") is not None:
            run["config"] |= {key: item["value"] for key, item in json.loads(variables["config"]).items()}
        project = {"id": "p", "name": variables.get("project") or "kvbench", "entity": {"id": "e", "name": ENTITY}}
        bucket = {"id": variables["name"], "name": variables["name"], "displayName": variables.get("displayName"), "project": project}
        return {"upsertBucket": {"bucket": {**bucket, "sweepName": None, "config": "{}", "historyLineCount": 0}, "inserted": True}}

    def _CreateRunFiles(self, variables: dict) -> dict:
        files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    def _ArtifactType(self, variables: dict) -> dict:
        return {"project": None}

    def _CreateArtifact(self, variables: dict) -> dict:
        made = variables.get("input", variables)
        self.artifacts.append(made)
        return {
            "createArtifact": {
                "artifact": {"id": f"a{len(self.artifacts)}", "state": "PENDING", "artifactSequence": {"id": "s", "latestArtifact": None}}
            }
        }

    def _CreateArtifactManifest(self, variables: dict) -> dict:
        file = {
            "id": "f",
            "name": "manifest",
            "displayName": "m",
            "uploadUrl": f"{self.url}/put/manifest-{len(self.uploads)}",
            "uploadHeaders": [],
        }
        return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}

    def _CreateArtifactFiles(self, variables: dict) -> dict:
        wanted = variables.get("input", variables)["artifactFiles"]
        nodes = [self._artifact_file(spec["name"]) for spec in wanted]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _artifact_file(self, name: str) -> dict:
        place = {"uploadUrl": f"{self.url}/put/artifact/{name}", "uploadHeaders": [], "storagePath": None, "uploadMultipartUrls": None}
        return {"id": "f", "name": name, "displayName": name, "artifact": {"id": "a1"}, **place}

    def _CommitArtifact(self, variables: dict) -> dict:
        return {"commitArtifact": {"artifact": {"id": "a1", "digest": "d"}}}

    def _ProjectInternalId(self, variables: dict) -> dict:
        return {"project": {"internalId": "cA=="}}

    def _GetProjects(self, variables: dict) -> dict:
        return {"models": {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}}}

    def _CreateProject(self, variables: dict) -> dict:
        return {
            "upsertModel": {
                "project": {"id": "p", "name": "kvbench", "entityName": ENTITY, "description": None, "access": None, "views": None}
            }
        }

    def _upsertView(self, variables: dict) -> dict:
        self.views.append(variables)
        project = {"id": "p", "name": "kvbench", "entityName": ENTITY}
        user = {"name": ENTITY, "username": ENTITY}
        times = dict.fromkeys(("createdAt", "updatedAt"), "2026-01-01T00:00:00Z")
        names = {"id": "Vmlldzox", "type": "runs", "name": "v", "displayName": variables.get("displayName"), "description": ""}
        view = {**names, **times, "project": project, "spec": variables.get("spec"), "user": user}
        return {"upsertView": {"view": view, "inserted": True}}

    def stream(self, run: str, sent: dict) -> None:
        """One request of the file stream: new lines of history, the summary, the end."""
        kept = self.runs[run]
        for name, part in sent.get("files", {}).items():
            lines = [json.loads(line) for line in part["content"]]
            if name == "wandb-history.jsonl":
                kept["history"] += lines
            elif name == "wandb-summary.json":
                kept["summary"] |= lines[-1]
        if sent.get("complete"):
            kept["exit"] = sent.get("exitcode")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def do_HEAD(self) -> None:
        self._send(b"")

    def do_GET(self) -> None:
        self._send(b"{}")

    def do_PUT(self) -> None:
        self.stub.uploads[self.path.removeprefix("/put/")] = self._body()
        self._send(b"", {"ETag": base64.b64encode(b"e").decode()})

    def do_POST(self) -> None:
        body = self._body()
        answer: dict = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            answer = {"data": self.stub.answer(asked["query"], asked.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            self.stub.stream(self.path.split("/")[-2], json.loads(body))
        self._send(json.dumps(answer).encode())

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            return gzip.decompress(data)
        return data

    def _send(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""
