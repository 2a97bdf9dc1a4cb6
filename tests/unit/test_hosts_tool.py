# SPDX-License-Identifier: GPL-3.0-or-later
"""The logic of the tool that makes the test hosts, and of the environments' layers; no host is made here."""

from __future__ import annotations

import importlib
import ipaddress
import json
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUFLEET_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(TESTS / "sglang_cpu"))
    monkeypatch.syspath_prepend(str(TESTS / "hosts"))
    for name in ("hosts", "layers"):
        sys.modules.pop(name, None)
    module = importlib.import_module("hosts")
    yield module
    for name in ("hosts", "layers", "build_env", "make_tiny_model"):
        sys.modules.pop(name, None)


def test_spec_reads_flags_values_and_repeated_mounts(hosts):
    spec = hosts.parse_spec("gpu-a:ops:env=sglang:models:ip=21:mount=/srv/w@/wheels:mount=/a@/b@rw")
    assert (spec.name, spec.ops, spec.env, spec.models, spec.ip) == ("gpu-a", True, "sglang", True, 21)
    assert spec.mount == ["/srv/w@/wheels", "/a@/b@rw"]


@pytest.mark.parametrize(
    "text", ["Gpu", "a_b", "a:opps", "a:ops=1", "a:ip=1", "a:ip=x", "a:env=", "a:mount=rel@/b", "a:overlay=/a"]
)
def test_bad_spec_is_one_message_that_names_the_host(hosts, text):
    with pytest.raises(hosts.UserError, match=text.split(":")[0]):
        hosts.parse_spec(text)


def test_addresses_go_around_the_fixed_ones(hosts):
    specs = [hosts.parse_spec(s) for s in ("a", "b:ip=12", "c:ops")]
    made = hosts.assign("p", ipaddress.IPv4Network("10.1.2.0/24"), "podman", specs)
    assert [(h.address, h.user) for h in made] == [("10.1.2.11", "root"), ("10.1.2.12", "root"), ("10.1.2.13", "ops")]
    with pytest.raises(hosts.UserError, match="share"):
        hosts.assign("p", ipaddress.IPv4Network("10.1.2.0/24"), "podman", [specs[1], hosts.parse_spec("d:ip=12")])


def test_state_round_trips_and_names_resolve(hosts, monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "key_file", lambda: tmp_path / "key")
    for prefix, net in (("p", "10.1.2.0/24"), ("q", "10.1.3.0/24")):
        specs = [hosts.parse_spec(s) for s in ("a", f"only-{prefix}:ops")]
        made = hosts.assign(prefix, ipaddress.IPv4Network(net), "podman", specs)
        hosts.store(prefix, net, {h.name: h for h in made})
        assert list(hosts.load(prefix).values()) == made
    assert hosts.prefixes() == ["p", "q"]
    assert hosts.resolve("only-q").address == hosts.resolve("q-only-q").address == "10.1.3.12"
    assert hosts.resolve("p/a").address == "10.1.2.11"
    with pytest.raises(hosts.UserError, match="more than one"):
        hosts.resolve("a")
    with pytest.raises(hosts.UserError, match="p/a, p/only-p"):
        hosts.resolve("nobody")


def test_inventory_has_literal_addresses_and_users(hosts, monkeypatch, tmp_path):
    yaml = pytest.importorskip("yaml")
    monkeypatch.setattr(hosts, "key_file", lambda: tmp_path / "key")
    made = hosts.assign("p", ipaddress.IPv4Network("10.1.2.0/24"), "podman", [hosts.parse_spec("a:ops")])
    data = yaml.safe_load(hosts.inventory(made))
    assert data["sglang"]["hosts"] == {"a": {"ansible_host": "10.1.2.11", "ansible_user": "ops"}}
    assert data["sglang"]["vars"]["ansible_ssh_private_key_file"] == str(tmp_path / "key")


def test_pip_settings_are_merged_and_their_local_paths_named(hosts):
    listing = (
        ":env:.find-links='/opt/w'\nglobal.cert='/etc/ca.crt'\nglobal.extra-index-url='file:///opt/a/simple x://y'\n"
        "user.cache-dir='/c'\n:env:.disable-pip-version-check='1'\nglobal.trusted-host='a\\nb'\n"
    )
    text, paths = hosts.pip_settings(listing)
    assert text.splitlines() == [
        "[global]",
        "find-links = /opt/w",
        "cert = /etc/ca.crt",
        "extra-index-url = file:///opt/a/simple x://y",
        "trusted-host = a b",
    ]
    assert paths == ["/opt/w", "/etc/ca.crt", "/opt/a/simple"]


def test_paths_inside_others_are_mounted_once(hosts):
    assert hosts.minimal(["/opt/a/b", "/opt/ab", "/opt/a/", "/opt/a"]) == ["/opt/a", "/opt/ab"]


def test_layers_are_shared_and_named_by_their_recipe(hosts, monkeypatch):
    layers = hosts.layers
    old, new = layers.find("sglang-0.5.9"), layers.find("sglang")
    assert [x.name for x in new.stack()] == ["torch", "sglang-deps", "sglang-0.5.23"]
    assert old.stack()[:2] == new.stack()[:2]
    assert layers.find("gpu-b").stack()[0] == new.stack()[0]
    assert new.lowerdir().split(":")[0].startswith(str(layers.cache_dir() / "env" / "sglang-0.5.23-"))
    before = new.key()
    monkeypatch.setattr(layers, "OWNER_UID", 1501)
    assert new.key() != before
    assert not new.built()
    with pytest.raises(SystemExit, match="gpu-b"):
        layers.find("gpu-x")


def test_tiny_models_are_whole_and_stable(hosts, tmp_path):
    tiny = importlib.import_module("make_tiny_model")
    tiny.ensure(tmp_path / "m", "qwen3moe")
    first = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "m").iterdir()}
    tiny.ensure(tmp_path / "m", "qwen3moe")
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "m").iterdir()} == first
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    vocab = json.loads((tmp_path / "m" / "tokenizer.json").read_text())["model"]["vocab"]
    assert config["num_experts"] == 8
    assert len(vocab) == 259 and sorted(vocab.values()) == list(range(259)) and config["vocab_size"] >= len(vocab)
