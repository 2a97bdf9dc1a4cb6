# SPDX-License-Identifier: GPL-3.0-or-later
"""From a plan that names a build to the steps that install the wheel, and what the role is told for it."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _journey

REMOVE = {"action": "pip_uninstall", "packages": ["sgl-deep-ep"], "args": {}}
BUILD = {"action": "build", "packages": [], "args": {"backend": "deep_ep"}}
INSTALL = {"action": "pip_install", "packages": ["/s/w.whl"], "args": {"flags": ["--no-deps", "--force-reinstall"]}}
WHEEL = {"backend": "deep_ep", "kind": "rebuild", "summary": "install w.whl", "steps": [INSTALL]}
OTHER = {"backend": "nixl", "use": "kv_transfer", "required": True, "kind": "install", "steps": [{"action": "x"}]}


def planned(*steps: dict[str, Any]) -> dict[str, Any]:
    return {
        "backend": "deep_ep",
        "use": "a2a",
        "state": "absent",
        "code": "absent",
        "kind": "rebuild",
        "summary": "build",
        "steps": list(steps),
        "required": True,
    }


def plan_of(remedy: dict[str, Any], venv: str = "/v") -> dict[str, Any]:
    return {"service": True, "unit": {"venv": venv}, "remedies": [remedy], "env": {"A": "1"}}


def test_only_the_build_step_gives_way_to_the_wheel_of_its_venv() -> None:
    remedies = {"/v": [OTHER, planned(REMOVE, BUILD)], "/w": [planned(BUILD)], "/x": [OTHER]}
    assert _journey.to_build(remedies) == ["/v", "/w"]
    done = _journey.with_wheels(remedies, {"/v": WHEEL})
    assert done["/v"][0] == OTHER and done["/x"] == [OTHER]
    assert done["/v"][1]["steps"] == [REMOVE, INSTALL]
    assert (done["/v"][1]["use"], done["/v"][1]["state"], done["/v"][1]["required"]) == ("a2a", "absent", True)
    assert done["/v"][1]["summary"] == "install w.whl"
    # Without a wheel the build stays, and backend_packages returns it as not executed.
    assert done["/w"] == remedies["/w"]
    assert remedies["/v"][1]["steps"] == [REMOVE, BUILD]


def test_a_wheel_that_did_not_help_is_not_built_a_second_time() -> None:
    tried = _journey.with_wheels({"/v": [planned(BUILD)]}, {"/v": WHEEL})
    assert _journey.further_remedies({"default": plan_of(planned(BUILD))}, tried) == {}
    assert _journey.further_remedies({"default": plan_of(OTHER)}, tried) == {"/v": [OTHER]}


@pytest.mark.parametrize(
    ("source", "path", "url"),
    [
        (None, "", ""),
        ("/srv/DeepEP", "/srv/DeepEP", ""),
        ("/srv/deepep-1.2.1.tar.xz", "/srv/deepep-1.2.1.tar.xz", ""),
        ("/srv/git/DeepEP.git", "", "/srv/git/DeepEP.git"),
        ("https://git.example.org/DeepEP", "", "https://git.example.org/DeepEP"),
        ("git@git.example.org:ep/DeepEP", "", "git@git.example.org:ep/DeepEP"),
    ],
)
def test_a_source_is_a_path_or_a_git_url(source: str | None, path: str, url: str) -> None:
    options = _journey.deepep_options({"deepep_source": source}, {}, {}, "/v")
    assert (options["source_path"], options["source_url"]) == (path, url)


def test_the_role_is_told_every_setting_of_a_build() -> None:
    settings = {
        "deepep_source": "https://git.example.org/DeepEP",
        "deepep_revision": "v1.2.1",
        "deepep_archs": ["9.0"],
        "deepep_cuda_home": "/usr/local/cuda-13.0",
        "deepep_nvshmem_dir": "/opt/nvshmem",
        "deepep_nccl_dir": "/opt/nccl",
        "deepep_wheel_url": "https://wheels.example.org/sglang/",
        "deepep_max_jobs": 4,
        "deepep_timeout": 60,
        "wheelhouse": "/srv/wheels",
        "artifacts_dir": "/srv/artifacts",
    }
    plans = {"a": plan_of(OTHER, "/other"), "b": {**plan_of(OTHER), "env": {"EP_NCCL_ROOT_DIR": "/opt/nccl"}}}
    assert _journey.deepep_options(settings, plans, {}, "/v") == {
        "venv": "/v",
        "source_path": "",
        "source_url": "https://git.example.org/DeepEP",
        "revision": "v1.2.1",
        "gpu_archs": ["9.0"],
        "toolkit": "/usr/local/cuda-13.0",
        "nvshmem_dir": "/opt/nvshmem",
        "nccl_dir": "/opt/nccl",
        "wheelhouse": "/srv/wheels",
        "wheel_url": "https://wheels.example.org/sglang",
        "max_jobs": 4,
        "time_limit": 60,
        "artifacts_dir": "/srv/artifacts",
        "service_environment": {"EP_NCCL_ROOT_DIR": "/opt/nccl"},
    }


def test_a_venv_without_a_service_is_proven_with_its_own_variables() -> None:
    intents = {"venvs": {"/v": {"user": "x", "environment": {"B": "2"}}}}
    assert _journey.deepep_options({}, {}, intents, "/v")["service_environment"] == {"B": "2"}


def test_a_revision_of_a_folder_is_refused_with_both_variables() -> None:
    with pytest.raises(ValueError, match=r"sglang_deepep_revision is v2.*sglang_deepep_source /srv/DeepEP"):
        _journey.deepep_options({"deepep_source": "/srv/DeepEP", "deepep_revision": "v2"}, {}, {}, "/v")


def test_only_what_imports_is_measured() -> None:
    probes = {f"/{state}": {"backends": {"deep_ep": {"state": state}}} for state in ("ok", "suspect", "absent")}
    assert _journey.to_measure({**probes, "/none": {}}) == ["/ok", "/suspect"]
