# SPDX-License-Identifier: GPL-3.0-or-later
"""Enough of AWX's API on the loopback for the real modules of awx.awx: lists by filter, objects, associations.

It keeps what is posted and invents nothing, so that what the modules send can be looked at.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

SUBLISTS = ("credentials", "success_nodes", "failure_nodes", "always_nodes", "labels", "instance_groups")


class FakeAwx:
    def __init__(self):
        self.store: dict[str, list[dict]] = {"organizations": [], "unified_job_templates": []}
        self.links: dict[str, list[int]] = {}
        self.specs: dict[str, dict] = {}
        self.writes: list[tuple[str, str, dict]] = []
        self.lock = threading.Lock()
        self.add("organizations", {"name": "Default"})

    def add(self, kind, item):
        identity = 1 + sum(map(len, self.store.values()))
        item = {**item, "id": identity, "url": f"/api/v2/{kind}/{identity}/", "type": kind[:-1]}
        item["related"] = {
            name: f"{item['url']}{name}/"
            for name in (*SUBLISTS, "survey_spec", "create_approval_template", "workflow_nodes")
        }
        item["summary_fields"] = {}
        if kind == "projects":
            item.update(status="successful", scm_revision="0", finished="2026-01-01T00:00:00Z")
        self.store.setdefault(kind, []).append(item)
        return item

    def find(self, kind, wanted):
        kinds = (
            ["job_templates", "projects", "inventory_sources", "workflow_job_templates"]
            if kind == "unified_job_templates"
            else [kind]
        )
        rows = [row for name in kinds for row in self.store.get(name, [])]
        for key, values in wanted.items():
            if key in ("page_size", "type", "order_by", "not__id"):
                continue
            name, value = key.split("__")[0].removeprefix("or"), values[0]
            name = key.split("__")[1] if key.startswith("or__") else key.split("__")[0]
            rows = [row for row in rows if (name in row and str(row[name]) == value) or name not in row]
        return rows

    def answer(self, method, path, query, body):
        parts = [part for part in path.split("/") if part][2:]
        if parts == ["ping"]:
            return 200, {"version": "24.6.1"}
        if method != "GET":
            self.writes.append((method, "/".join(parts), body))
        if len(parts) == 1:
            if method == "POST":
                return 201, self.add(parts[0], body)
            rows = self.find(parts[0], query)
            return 200, {"count": len(rows), "results": rows, "next": None}
        owner = next((row for row in self.store.get(parts[0], []) if str(row["id"]) == parts[1]), None)
        if owner is None:
            return 404, {"detail": "not found"}
        if len(parts) == 2:
            if method == "PATCH":
                owner.update(body)
            return 200, owner
        if parts[2] == "survey_spec":
            if method == "POST":
                self.specs[path] = body
            return 200, self.specs.get(path, {})
        if parts[2] == "create_approval_template":
            # AWX keeps of an approval only these.
            made = self.add(
                "workflow_approval_templates",
                {key: body[key] for key in ("name", "description", "timeout") if key in body},
            )
            owner["unified_job_template"] = made["id"]
            owner["related"]["unified_job_template"] = made["url"]
            return 201, made
        if parts[2] in SUBLISTS:
            linked = self.links.setdefault(path, [])
            if method == "POST":
                linked.append(body["id"])
                return 204, None
            rows = [row for kind in self.store.values() for row in kind if row["id"] in linked]
            return 200, {"count": len(rows), "results": rows, "next": None}
        if parts[2] == "workflow_nodes":
            rows = [
                row
                for row in self.store.get("workflow_job_template_nodes", [])
                if row.get("workflow_job_template") == owner["id"]
            ]
            return 200, {"count": len(rows), "results": rows, "next": None}
        return 200, {"count": 0, "results": [], "next": None}


def serve():
    """Start on a free port of the loopback; returns (server, fake)."""
    fake = FakeAwx()

    class Handler(BaseHTTPRequestHandler):
        def _do(self):
            url = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            with fake.lock:
                status, data = fake.answer(self.command, url.path, parse_qs(url.query), body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("X-API-Product-Name", "AWX")
            self.send_header("X-API-Product-Version", "24.6.1")
            text = b"" if data is None else json.dumps(data).encode()
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_DELETE = _do

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, fake
