# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rows of rules: every one has a range that can be read and a source, and unknown versions say unknown."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _rules, _versions

from tests.unit.plan_support import VERSIONS, server_args


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("0.5.9", "0.5.10"),
        ("0.5.15", "0.5.15.post1"),
        ("0.5.15.post1", "0.5.15.post2"),
        ("0.5.16rc1", "0.5.16"),
        ("0.5.16.dev3", "0.5.16rc1"),
        ("0.5.16a1", "0.5.16b1"),
        ("0.3.10.post2", "0.3.13.post1"),
        ("1.9", "1!0.1"),
    ],
)
def test_order_of_versions(older: str, newer: str) -> None:
    left, right = _versions.parse(older), _versions.parse(newer)
    assert left is not None and right is not None
    assert left < right


@pytest.mark.parametrize(
    ("version", "wanted", "answer"),
    [
        ("0.5.15.post1", "==0.5.15.*", True),
        ("0.5.16", "==0.5.15.*", False),
        ("0.5", "==0.5.0", True),
        ("2.14.1+cu130", "==2.14.1", True),
        ("0.5.12", ">=0.5.6,<0.5.13", True),
        ("0.5.13", ">=0.5.6,<0.5.13", False),
        ("0.5.13", "!=0.5.13", False),
        ("v0.5.13", "", True),
        ("main-20260101", ">=0.5", None),
        (None, ">=0.5", None),
        (None, "", True),
    ],
)
def test_ranges(version: str | None, wanted: str, answer: bool | None) -> None:
    assert _versions.within(version, wanted) is answer


def test_a_range_that_is_none_is_an_error_of_ours() -> None:
    with pytest.raises(ValueError, match="not a version range"):
        _versions.within("1.0", "about 1.0")


def test_every_row_has_a_source_and_a_range() -> None:
    ranged: list[Any] = [*_rules.ARCH_RULES, *_rules.RENAMES, *_rules.MATCHES]
    others: list[Any] = [*_rules.A2A_BACKENDS.values(), *_rules.ENV_RENAMES]
    for row in ranged + others:
        assert row.source
    for row in ranged:
        assert _versions.within("0.5.23", row.sglang) is not None
    for match in _rules.MATCHES:
        assert _versions.within("1.0", match.backend) is not None
    behaviours = [value for value in vars(_rules).values() if isinstance(value, _rules.Behaviour)]
    assert behaviours
    for behaviour in behaviours:
        assert behaviour.source
        assert _rules.holds(behaviour, None) is None
        assert _rules.holds(behaviour, "main") is None


@pytest.mark.parametrize("version", VERSIONS)
def test_every_a2a_choice_of_every_version_has_a_row(version: str) -> None:
    choices = server_args(version)["flags"]["moe_a2a_backend"]["choices"]
    assert set(choices) <= set(_rules.A2A_BACKENDS)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_transfer_backend_of_every_version_has_a_row(version: str) -> None:
    flags = server_args(version)["flags"]
    assert set(flags["disaggregation_transfer_backend"]["choices"]) <= set(_rules.KV_LIBRARIES)
    elastic = flags.get("elastic_ep_backend", {}).get("choices") or []
    assert set(elastic) <= set(_rules.ELASTIC_LIBRARIES)


@pytest.mark.parametrize("version", VERSIONS)
def test_values_that_arch_rules_name_are_values_somewhere(version: str) -> None:
    """A rule about a value that no version has would be a misspelling."""
    for rule in _rules.ARCH_RULES:
        known = {
            str(choice)
            for release in VERSIONS
            for flag in rule.flags
            for choice in server_args(release)["flags"].get(flag, {}).get("choices") or []
        }
        assert set(rule.values) <= known | {"experimental_sgl_trtllm"}, rule


@pytest.mark.parametrize("row", _rules.RENAMES, ids=lambda row: row.flag)
def test_renames_agree_with_the_definitions(row: _rules.Rename) -> None:
    """Where a row says that a flag is gone, no version in its range has it undeprecated, and some has the new one."""
    for version in VERSIONS:
        entry = server_args(version)["flags"].get(row.flag)
        if _versions.within(version, row.sglang):
            assert entry is None or entry["deprecated"], version
    newest = server_args(VERSIONS[-1])["flags"]
    middle = server_args("0.5.18")["flags"]
    for key in row.becomes:
        assert key in newest or key in middle, key


@pytest.mark.parametrize(
    ("capability", "family"), [("12.0", "sm_120"), ("9.0", "sm_90"), ("10.3", "sm_103"), (None, None), ("N/A", None)]
)
def test_families(capability: str | None, family: str | None) -> None:
    assert _rules.sm_family(capability) == family


def test_matches_are_seen_and_not_guessed() -> None:
    assert _rules.match("nixl", "a2a", "1.4.1", "0.5.15.post1").works is False  # type: ignore[union-attr]
    assert _rules.match("nixl", "a2a", "1.5.1", "0.5.23") is None
    assert _rules.match("mooncake", "a2a", None, "0.5.15.post1") is None
