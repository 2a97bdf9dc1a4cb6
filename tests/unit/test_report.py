# SPDX-License-Identifier: GPL-3.0-or-later
"""The report: its document, its table, its page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
import report_support as fake
from ansible_collections.gpufleet.sglang.plugins.module_utils import _report
from ansible_collections.gpufleet.sglang.plugins.plugin_utils import _report_html
from hypothesis import given
from hypothesis import strategies as st

SCHEMA = json.loads(Path("docs/schemas/report.schema.json").read_text())


def make(hosts, **more):
    return _report.document(_report.records(hosts, hosts), generated="2026-11-30T22:00:00Z", **more)


def test_document_follows_its_schema_for_every_kind_of_host():
    hosts = fake.fleet(400)
    hosts["absent"] = fake.facts(
        {"venv": {"path": "/x", "state": "venv_absent", "code": "venv_absent", "message": "no"}}
    )
    report = make(hosts)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(json.loads(json.dumps(report)), SCHEMA)
    assert {entry["status"] for entry in report["hosts"].values()} == {"ok", "attention", "failed", "unreachable"}
    assert sum(report["summary"][key] for key in ("ok", "attention", "failed", "unreachable")) == 401


def test_next_steps_are_one_each_and_those_that_mend_most_come_first():
    report = make(
        {
            "a": fake.facts(
                fake.broken("nixl", state="absent", code="not_installed"),
                fake.plan(remedies=[fake.remedy("nixl", code="not_installed", summary="install nixl")]),
            ),
            "b": fake.facts(fake.broken("mooncake", **fake.MISSING), fake.plan(remedies=[fake.remedy()])),
            "c": fake.facts(fake.broken("mooncake", **fake.MISSING), fake.plan(remedies=[fake.remedy()])),
        }
    )  # fmt: skip
    assert [(s["count"], s["backend"], s["hosts"]) for s in report["next_steps"]] == [
        (2, "mooncake", ["b", "c"]),
        (1, "nixl", ["a"]),
    ]
    assert report["next_steps"][0]["command"].endswith("sglang_remediate_codes=missing_system_lib")


def test_a_mended_host_shows_before_and_after_and_has_nothing_left_to_do():
    facts = fake.facts(
        before=fake.broken("mooncake", **fake.MISSING),
        rollout_assumed={"default": fake.plan(remedies=[fake.remedy()])},
        rollout_work={},
        ready_results=fake.ready(),
    )
    report = make({"gpu-a": facts})
    assert report["next_steps"] == [] and report["hosts"]["gpu-a"]["status"] == "ok"
    line = next(line for line in _report.report_table(report).splitlines() if "mooncake" in line)
    assert re.search(r"broken +missing_system_lib +install libnuma1 and libibverbs1 +ok", line)


def test_a_failed_host_says_so_and_why():
    failure = {"task": "Wait until it serves", "message": "no progress for 600 s", "cause": {}}
    report = make(
        {
            "gpu-a": fake.facts(
                rollout_failure=failure, ready_results=fake.ready("stuck", code="stalled", mend="see the log")
            )
        }
    )
    assert report["hosts"]["gpu-a"]["status"] == "failed"
    assert "see the log" in [s["summary"] for s in report["next_steps"]]
    assert any("no progress for 600 s" in s["summary"] for s in report["next_steps"])


def test_a_backend_that_nothing_wants_asks_for_nothing():
    report = make({"gpu-a": fake.facts(fake.broken("nixl", state="absent", code="not_installed"))})
    assert report["next_steps"] == [] and report["hosts"]["gpu-a"]["status"] == "ok"
    assert "(not wanted)" in _report.report_table(report)


def test_what_plans_do_without_is_told_with_its_reason():
    report = make({"a": fake.facts(fake.broken("deep_ep", **fake.ABI), fake.plan(decisions=[fake.FALLBACK]))})
    assert "moe_a2a_backend: none: deep_ep is broken (torch_abi_mismatch)" in _report.report_table(report)


def test_the_host_that_differs_stands_out_with_what_it_has():
    hosts = {f"g{n}": fake.facts() for n in range(9)}
    hosts["odd"] = fake.facts(fake.probe(driver="570.1", gpus=7))
    hosts["odd"]["probe_results"][fake.VENV]["backends"]["nixl"]["distributions"] = []
    group = make(hosts)["groups"][0]
    assert group["name"] == "NVIDIA H200" and group["outliers"] == ["odd"]
    differing = {row["name"]: row["others"] for row in group["attributes"] if row["others"]}
    assert set(differing) == {"gpus", "driver", "nixl"}
    assert differing["nixl"] == [{"value": "none", "hosts": ["odd"]}]


@pytest.mark.parametrize("width", [100, 120, 160])
def test_the_table_keeps_its_width(width):
    hosts = fake.fleet(200)
    long = fake.remedy(summary="replace the wheel with the build for this torch, " * 6)
    hosts["a-host-with-a-rather-long-name.rack7.dc1.example.org"] = fake.facts(
        fake.broken("mooncake", **fake.MISSING), fake.plan(remedies=[long])
    )
    assert max(map(len, _report.report_table(make(hosts), width).splitlines())) <= width


def test_a_thousand_hosts_fit_on_a_screen_or_two():
    text = _report.report_table(make(fake.fleet(1000)))
    assert len(text.splitlines()) < 80
    assert text.splitlines()[-1].startswith("1000 hosts: ")


def test_secrets_are_nowhere_in_the_report_not_even_in_log_lines():
    cause = {"code": "x", "message": "m", "lines": ["server_args=ServerArgs(api_key='s3cr3t-key', tp_size=8)"]}
    report = make({"a": fake.facts(ready_results=fake.ready("failed", **cause))}, secrets=["s3cr3t-key"])
    assert "s3cr3t-key" not in json.dumps(report) + _report_html.render(report)
    assert "api_key='***'" in json.dumps(report)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["gpu-9", "gpu-10"], "gpu-[9-10]"),
        (["gpu-09", "gpu-10"], "gpu-[09-10]"),
        (["gpu-1.dc1.x", "gpu-3.dc1.x"], "gpu-[1,3].dc1.x"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        (["alpha", "gpu-1"], "alpha, gpu-1"),
    ],
)
def test_names_are_folded(hosts, text):
    assert _report.fold(hosts) == text


def unfold(text):
    names = []
    for part in re.findall(r"[^,\[\]]*(?:\[[^\]]*\])?[^,\[\]]*", text):
        match = re.fullmatch(r"(.*)\[(.*)\](.*)", part.strip())
        if not match:
            names += [part.strip()] if part.strip() else []
            continue
        for span in match.group(2).split(","):
            first, _, last = span.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names.append(f"{match.group(1)}{number:0{len(first) if first.startswith('0') else 0}d}{match.group(3)}")
    return names


@given(
    st.lists(
        st.from_regex(r"(n|gpu-|r1-)[0-9]{1,4}(\.dc[12]\.x)?", fullmatch=True), unique=True, min_size=1, max_size=30
    )
)
def test_folding_loses_no_host(hosts):
    assert sorted(unfold(_report.fold(hosts))) == sorted(hosts)


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script><!--\u2028'\"&{{7*7}}"


def test_hostile_text_stays_text_and_the_page_asks_for_nothing_outside():
    facts = fake.facts(
        fake.broken("mooncake", state="broken", code="missing_system_lib", message=EVIL, name=EVIL, version=EVIL),
        fake.plan(warnings=[{"code": "w", "message": EVIL}], remedies=[fake.remedy(summary=EVIL)]),
        ready_results=fake.ready("failed", code="x", message=EVIL, mend=EVIL, lines=[EVIL]),
        rollout_failure={"task": EVIL, "message": EVIL, "cause": {}},
    )
    html = _report_html.render(make({EVIL: facts}))
    page = Page()
    page.feed(html)
    assert not any(tag in ("img", "link", "iframe", "base") for tag, _ in page.tags)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not any(name.startswith("on") or name in ("src", "style") for _, attrs in page.tags for name in attrs)
    assert all(attrs["href"].startswith("#") for tag, attrs in page.tags if "href" in attrs)
    assert "{{7*7}}" in html and "<img" not in html


def test_rendering_a_thousand_hosts_gives_a_page_that_can_be_mailed():
    html = _report_html.render(make(fake.fleet(1000)))
    assert html.count('<tr class="host"') == 1000
    assert len(html) < 6_000_000


def test_a_preference_that_the_plan_passed_over_says_what_it_took():
    decision = {
        "question": "moe_a2a_backend",
        "answer": "none",
        "evidence": {"candidates": {"deepep": {"usable": False}}},
    }
    plan = {"service": True, "unit": {"venv": "/v"}, "decisions": [decision]}
    record = {"plans": {"default": plan}}
    assert _report._passed_over(record, "/v", "deep_ep") == "none"
    assert _report._passed_over(record, "/v", "mooncake") is None
    assert _report._passed_over(record, "/other", "deep_ep") is None
