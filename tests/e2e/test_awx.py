# SPDX-License-Identifier: GPL-3.0-or-later
"""AWX as code.

The real modules of awx.awx against a server that keeps what they send, and the definitions themselves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import fake_awx
import pytest
import yaml
from ansible_collections.gpufleet.sglang.plugins.module_utils import _intents

ROOT = Path(__file__).parents[2]
BUNDLE = "ansible==12.3.0"
AWX_VERSION = "24.6.1"
DEFINITIONS = yaml.safe_load((ROOT / "awx/definitions.yml").read_text())
TEMPLATES = {item["name"]: item for item in DEFINITIONS["sglang_awx_job_templates"]}


@pytest.fixture(scope="session")
def collections():
    """A folder with awx.awx, taken from PyPI's bundle of collections and kept in the cache."""
    cache = Path(
        os.environ.get("GPUFLEET_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpufleet-sglang"
    )
    target = cache / f"awx-{AWX_VERSION}"
    if not (target / "ansible_collections/awx/awx/MANIFEST.json").exists():
        part = cache / f"awx-{AWX_VERSION}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", part, BUNDLE], check=True)
        wheel = next(part.glob("*.whl"))
        with zipfile.ZipFile(wheel) as bundle:
            bundle.extractall(
                part, [name for name in bundle.namelist() if name.startswith("ansible_collections/awx/awx/")]
            )
        wheel.unlink()
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    return target


def test_the_version_that_is_tested_is_the_one_that_is_asked_for(collections):
    manifest = yaml.safe_load((collections / "ansible_collections/awx/awx/MANIFEST.json").read_text())
    wanted = yaml.safe_load((ROOT / "awx/requirements.yml").read_text())["collections"]
    assert wanted == [{"name": "awx.awx", "version": manifest["collection_info"]["version"]}]


def test_awx_is_configured_by_its_own_modules_and_a_second_run_sends_nothing_new(collections):
    server, fake = fake_awx.serve()
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(collections),
        "CONTROLLER_HOST": f"http://127.0.0.1:{server.server_port}",
        "CONTROLLER_OAUTH_TOKEN": "token",
        "no_proxy": "*",
    }
    sent: list[int] = []
    try:
        runs = [
            subprocess.run(
                ["ansible-playbook", "-i", "localhost,", "awx/configure.yml"],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            for _ in range(2)
            if not sent.append(len(fake.writes))
        ]
    finally:
        server.shutdown()
        server.server_close()
    assert [run.returncode for run in runs] == [0, 0], runs[0].stdout + runs[0].stderr + runs[1].stdout
    # The module cannot see an approval's place in its workflow and sends it again each time; nothing else is sent.
    approval = fake.store["workflow_approval_templates"][0]["id"]
    assert {(method, path) for method, path, _ in fake.writes[sent[1] :]} <= {
        ("PATCH", f"workflow_approval_templates/{approval}")
    }
    templates = {row["name"]: row for row in fake.store["job_templates"]}
    assert set(templates) == {f"sglang {name}" for name in ("probe", "site", "remediate", "verify", "rollback")}
    assert all(
        not row["allow_simultaneous"] and row["job_slice_count"] == 1
        for name, row in templates.items()
        if TEMPLATES[name.split()[1]]["ordered"]
    )
    nodes = {row["identifier"]: row["id"] for row in fake.store["workflow_job_template_nodes"]}
    edges = {path.split("/")[4]: ids for path, ids in fake.links.items() if path.endswith("success_nodes/")}
    assert edges == {str(nodes["probe"]): [nodes["approve"]], str(nodes["approve"]): [nodes["site"]]}
    assert fake.store["schedules"][0]["unified_job_template"] == templates["sglang verify"]["id"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_name_playbooks_that_exist_and_variables_that_are_known(name):
    template = TEMPLATES[name]
    play = yaml.safe_load((ROOT / template["playbook"]).read_text())
    assert play[0]["hosts"] == "sglang"
    for question in template["survey"]:
        assert question["variable"] in _intents.BY_NAME, question
        assert question["type"] != "multiplechoice" or question["default"] in question["choices"]


def test_every_answer_of_every_survey_is_understood():
    questions = [question for template in TEMPLATES.values() for question in template["survey"]]
    for question in questions:
        for answer in question.get("choices") or [question["default"]]:
            assert isinstance(answer, str)
            result = _intents.intents({question["variable"]: answer}, yaml.safe_load)
            assert [p for p in result["problems"] if p["variable"] == question["variable"]] == [], (question, answer)
    assert (
        _intents.intents({"sglang_manage_system_packages": "false"}, yaml.safe_load)["settings"][
            "manage_system_packages"
        ]
        is False
    )
    assert _intents.intents({"sglang_waves": "1, 10%"}, yaml.safe_load)["settings"]["waves"] == [1, "10%"]


def test_secrets_are_secret_fields_and_each_is_handed_over():
    for kind in DEFINITIONS["sglang_awx_credential_types"]:
        fields = {field["id"] for field in kind["inputs"]["fields"]}
        assert all(field["secret"] for field in kind["inputs"]["fields"])
        # An empty secret would be refused: SGLang would serve without a key.
        assert set(kind["inputs"]["required"]) == fields
        handed = kind["injectors"]["extra_vars"]["sglang_secrets"]
        assert set(handed) == fields
        assert all(re.fullmatch(r"\{\{ '\{\{' \}\} \w+ \{\{ '\}\}' \}\}", text) for text in handed.values())
