# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The flags of an SGLang, read from its source: small trees in each layout, and every wheel of the matrix."""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _server_args
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import RunResult
from hypothesis import given, settings
from hypothesis import strategies as st

DUMPS = Path(__file__).parents[1] / "fixtures" / "sglang_flags" / "argparse_dumps.json.xz"
REAL = json.loads(lzma.decompress(DUMPS.read_bytes()))
CACHE = Path(os.environ.get("GPUFLEET_CACHE") or Path.home() / ".cache" / "gpufleet-sglang") / "wheels"
FIELDS = (
    "dest",
    "nargs",
    "const",
    "default",
    "type",
    "choices",
    "required",
    "new_flag",
    "error_message",
    "const_value",
)

ADD_ARGUMENT = """
import argparse
import dataclasses
import json
from enum import Enum
from typing import List, Optional

raise_if_imported = 1
BACKENDS = ["none", "deepep"]
MORE = BACKENDS + ["mooncake"]


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


class Parsers:
    Table = {"kimi": object, **{"qwen": object}}


class Retired(argparse.Action):
    def __init__(self, option_strings, dest, new_flag=None, nargs=0, **kwargs):
        self.new_flag = new_flag
        super().__init__(option_strings, dest, nargs=nargs, **kwargs)


def size_choices():
    if "x" in ():
        return []
    return [1, 2, 4]


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    tp_size: int = 1
    ep_size: int = 1
    timeout: float = -0.5
    a2a: str = BACKENDS[0]
    mode: str = Mode.FAST.value
    tags: Optional[List[str]] = None
    quiet: bool = False

    @staticmethod
    def add_cli_args(parser):
        group = parser
        parsers = list(Parsers.Table.keys())
        parser.add_argument("--model-path", "--model", type=str, required=True, help="The model.")
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=ServerArgs.tp_size)
        parser.add_argument("--ep-size", "--ep", type=int, default=ServerArgs.ep_size, choices=size_choices())
        parser.add_argument("--timeout", type=float, default=ServerArgs.timeout)
        group.add_argument("--a2a", choices=MORE, default=ServerArgs.a2a)
        parser.add_argument("--mode", type=str, choices=[m.value for m in Mode], default=ServerArgs.mode)
        parser.add_argument("--reasoning-parser", choices=["auto"] + parsers)
        parser.add_argument("--tags", type=str, nargs="*", default=ServerArgs.tags)
        parser.add_argument("--sizes", type=int, nargs=2)
        parser.add_argument("--override", type=json.loads, help=f"Known: {parsers}.")
        parser.add_argument("--quiet", action="store_true", default=ServerArgs.quiet)
        parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
        parser.add_argument("--old-mode", action=Retired, new_flag="--mode", help="Gone.")
        for name in ("alpha", "beta"):
            parser.add_argument("--rope-" + name, type=float)
        if raise_if_imported:
            parser.add_argument("--loud", action="store_true")
"""

ANNOTATED = '''
import argparse
import dataclasses
from typing import Annotated as A
from sglang.srt.choices import BACKENDS
from sglang.srt.arg_utils import Arg, add_cli_args_from_dataclass, human_readable_int


@dataclasses.dataclass
class ServerArgs:
    """Text."""

    model_path: A[str, Arg(help="The model.", aliases=["--model"])]
    tp_size: A[int, Arg(help="TP", cli_name="--tensor-parallel-size", aliases=["--tp-size"])] = 1
    twice: A[int, "first"] = 1
    twice: A[int, "second"] = 2
    a2a: A[Literal["none", "deepep"], "A2A."] = "none"
    backend: A[Optional[str], Arg(help="x", choices=BACKENDS)] = None
    tags: A[Optional[List[str]], "Tags."] = None
    sizes: A[List[int], Arg(help="x", nargs="*")] = dataclasses.field(default_factory=lambda: [1, 2])
    budget: A[int, Arg(help="x", type_parser=human_readable_int)] = 1 << 20
    quiet: A[bool, "Quiet."] = False
    overlap: A[Optional[bool], Arg(help="x", action=argparse.BooleanOptionalAction)] = None
    hidden: A[str, Arg(help="x", no_cli=True)] = "x"
    union: A["int | None", "x"] = None
    plain: int = 3

    @staticmethod
    def add_cli_args(parser):
        add_cli_args_from_dataclass(parser, ServerArgs)
        if envs.SOMETHING.get():
            parser.add_argument("--only-there", action="store_true")
        parser.add_argument("--config", type=str)
        parser.add_argument("--hidden-old", action="store_true", help="Deprecated. Use --backend new instead.")
'''

ENVIRON = """
import os

class EnvBool:
    pass

class Envs:
    SGLANG_NEW = EnvBool(True)
    SGLANG_DISPATCH_TOKENS = EnvInt(128)
    SGLANG_RENAMED = EnvBoolWithAlias(False, deprecated_name="SGLANG_FORMER")
    # comment
    private = 1

_DEPRECATED_ENVS = {
    "SGLANG_OLD": _DeprecatedEnv(replacement="SGLANG_NEW", transform=_invert),
    "SGLANG_GONE": _DeprecatedEnv(note="Use '--a2a' " "instead."),
}

def _print_deprecated_env(new_name: str, old_name: str):
    pass

def _convert():
    _print_deprecated_env("SGLANG_NEW", "SGLANG_OLDER")
    table = {"SGLANG_WAIT_MS": "SGLANG_NEW"}
"""


def tree(base: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(base)


@pytest.fixture
def classic(tmp_path: Path) -> str:
    return tree(tmp_path, {"sglang/srt/server_args.py": ADD_ARGUMENT, "sglang/srt/environ.py": ENVIRON})


@pytest.fixture
def annotated(tmp_path: Path) -> str:
    choices = {"__init__": "from .names import *\n", "names": 'BACKENDS = ["a", "b"]\n'}
    files = {f"sglang/srt/choices/{name}.py": text for name, text in choices.items()}
    return tree(tmp_path, {"sglang/srt/server_args.py": ANNOTATED, **files})


def differences(read: list[dict], real: list[dict]) -> list[str]:
    """What differs from the real argparse, flag by flag; sets of choices have no order."""
    ours = {tuple(action["option_strings"]): action for action in read}
    theirs = {tuple(action["option_strings"]): action for action in real}
    out = [f"{key} is only in one" for key in set(ours) ^ set(theirs)]
    for key in set(ours) & set(theirs):
        for field in FIELDS:
            mine, truth = ours[key][field], theirs[key][field]
            if field == "choices" and mine is not None and truth is not None:
                mine, truth = sorted(map(str, mine)), sorted(map(str, truth))
            if mine != truth:
                out.append(f"{key[0]} {field}: {mine!r} is {truth!r}")
    return sorted(out)


def dumped(parser: argparse.ArgumentParser) -> list[dict]:
    return [
        {
            **{field: getattr(action, field, None) for field in FIELDS},
            "type": getattr(action.type, "__name__", None),
            "option_strings": action.option_strings,
        }
        for action in parser._actions
        if "--help" not in action.option_strings
    ]


def test_add_argument_layout_equals_the_real_argparse(classic: str) -> None:
    spec = importlib.util.spec_from_file_location("tiny_server_args", f"{classic}/sglang/srt/server_args.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        parser = argparse.ArgumentParser()
        module.ServerArgs.add_cli_args(parser)
    finally:
        del sys.modules[spec.name]
    read = _server_args.read_actions(classic)
    assert read["layout"] == "add_argument"
    assert differences(read["actions"], dumped(parser)) == []
    assert read["unresolved"] == []


def test_annotated_layout(annotated: str) -> None:
    result = _server_args.read_server_args(annotated, "9.9")
    flags = result["flags"]
    assert (result["state"], result["layout"], result["problem"]) == ("ok", "annotated", None)
    names = "model_path tp_size twice a2a backend tags sizes budget quiet overlap union only_there config hidden_old"
    assert set(flags) == set(names.split(" "))
    assert flags["tp_size"]["flag"] == "--tp-size"
    assert flags["tp_size"]["aliases"] == ["--tensor-parallel-size"]
    assert flags["model_path"]["required"] is True
    assert flags["twice"]["default"] == 2
    assert flags["a2a"]["choices"] == ["none", "deepep"]
    assert flags["backend"]["choices"] == ["a", "b"]
    assert (flags["tags"]["nargs"], flags["sizes"]["nargs"], flags["sizes"]["type"]) == ("+", "*", "int")
    assert flags["sizes"]["default"] == [1, 2]
    assert (flags["budget"]["parser"], flags["budget"]["type"]) == ("human_readable_int", "int")
    assert flags["quiet"]["action"] == "store_true"
    assert (flags["overlap"]["action"], flags["overlap"]["aliases"]) == ("boolean_optional", ["--no-overlap"])
    assert flags["union"]["type"] == "int"
    assert flags["only_there"]["uncertain"] is True
    assert flags["hidden_old"]["deprecated"] == {"replacement": "--backend new", "message": "", "removed": False}


def test_namespaces_layout_follows_the_list_and_a_class_that_is_bound_again(tmp_path: Path) -> None:
    site = tree(
        tmp_path,
        {
            "sglang/srt/server_args.py": textwrap.dedent("""
                from .arg_groups.fields.model import Model
                from sglang.srt.arg_groups.fields.parallel import Parallel as P

                _INPUT_NAMESPACES = [Model, P]

                def _names():
                    cached = None
                    if cached is not None:
                        return list(cached.Map)
                    from sglang.srt.arg_groups.choices import NAMES
                    return list(NAMES)

                class ServerArgs:
                    @staticmethod
                    def add_cli_args(parser):
                        add_cli_args_from_dataclass(parser, ServerArgs)
                        names = _names()
                        parser.add_argument(
                            "--name", choices=["auto"] + names, default=_declared_default("name"))

                ServerArgs = make_struct(ServerArgs)
            """),
            "sglang/srt/arg_groups/fields/model.py": textwrap.dedent("""
                class Model(msgspec.Struct):
                    _NS_PATH = "model"
                    model_path: A[str, Arg(help="x")]
                    name: str = "auto"
            """),
            "sglang/srt/arg_groups/fields/parallel.py": textwrap.dedent("""
                from sglang.srt.arg_groups.choices import SIZES
                class Parallel(msgspec.Struct):
                    ep_size: A[int, Arg(help="x", choices=SIZES, aliases=["--ep"])] = 1
            """),
            "sglang/srt/arg_groups/choices.py": "NAMES = ['x', 'y']\nSIZES = sorted({4, 1, 2})\n",
        },
    )
    result = _server_args.read_server_args(site)
    assert (result["state"], result["layout"]) == ("ok", "namespaces")
    assert result["flags"]["ep_size"]["choices"] == [1, 2, 4]
    assert result["flags"]["name"]["choices"] == ["auto", "x", "y"]
    assert result["flags"]["name"]["default"] == "auto"


def test_nothing_is_imported(classic: str) -> None:
    path = Path(classic, "sglang/srt/server_args.py")
    path.write_text(path.read_text() + "\nraise SystemExit(3)\n")
    before = set(sys.modules)
    assert _server_args.read_server_args(classic)["state"] == "ok"
    assert {name for name in set(sys.modules) - before if name.startswith("sglang")} == set()
    assert list(Path(classic).rglob("__pycache__")) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def broken(", "absent or cannot be parsed"),
        ("class Other: pass", "no class ServerArgs"),
        ("class ServerArgs: pass", "no ServerArgs.add_cli_args"),
        ("class ServerArgs:\n    def add_cli_args(parser):\n        Registry.install(parser)\n", "no --model-path"),
    ],
)
def test_an_unknown_layout_is_unknown(tmp_path: Path, text: str, said: str) -> None:
    result = _server_args.read_server_args(tree(tmp_path, {"sglang/srt/server_args.py": text}))
    assert result["state"] == "unknown"
    assert said in result["problem"]
    assert result["flags"] == {}


def test_flags_that_cannot_be_followed_are_told(classic: str) -> None:
    path = Path(classic, "sglang/srt/server_args.py")
    path.write_text(path.read_text() + "        plugin.register(parser)\n        parser.add_argument(name_of_it)\n")
    result = _server_args.read_server_args(classic)
    assert result["state"] == "ok"
    assert "call of plugin.register" in result["problem"]
    assert "flag: name_of_it" in result["problem"]


class Recorder:
    """Answers every command with one result, and remembers the commands."""

    def __init__(self, result: RunResult) -> None:
        self.result = result
        self.calls: list[tuple[list[str], float]] = []

    def __call__(self, argv, timeout):
        self.calls.append((list(argv), timeout))
        return self.result


def helped() -> str:
    parser = argparse.ArgumentParser(prog="x", formatter_class=argparse.HelpFormatter)
    parser.add_argument("--model-path", "--model", type=str, required=True, help="The model --not-a-flag.")
    parser.add_argument("--moe-a2a-backend", choices=["none", "deepep"], help="A2A.")
    parser.add_argument("--a-flag-with-a-name-longer-than-its-column-is", type=int, metavar="N", help="Long.")
    parser.add_argument("--tags", nargs="+")
    parser.add_argument("--more", nargs="*")
    parser.add_argument("--maybe", nargs="?")
    parser.add_argument("--quiet", action="store_true", help="Quiet.")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, help="Overlap.")
    return parser.format_help()


def test_help_is_the_fallback(tmp_path: Path) -> None:
    site = tree(tmp_path, {"sglang/srt/server_args.py": "NEW_LAYOUT = 1"})
    runner = Recorder(RunResult(0, helped(), ""))
    venv = {"path": site, "python": f"{site}/bin/python"}
    context = Context(run=runner, venv=venv, sglang={"version": "0.9.0", "path": f"{site}/sglang"}, import_timeout=33)
    result = _server_args.gather(context)
    assert runner.calls == [([f"{site}/bin/python", "-m", "sglang.launch_server", "--help"], 33)]
    assert (result["state"], result["layout"], result["sglang_version"]) == ("ok", "help", "0.9.0")
    flags = _server_args.expand(result)["flags"]
    assert set(flags) == {
        "model_path", "moe_a2a_backend", "a_flag_with_a_name_longer_than_its_column_is", "tags", "more", "maybe",
        "quiet", "overlap",
    }  # fmt: skip
    assert flags["model_path"]["aliases"] == ["--model"]
    assert flags["moe_a2a_backend"]["choices"] == ["none", "deepep"]
    assert [flags[name]["nargs"] for name in ("tags", "more", "maybe", "model_path")] == ["+", "*", "?", None]
    assert (flags["quiet"]["action"], flags["overlap"]["action"]) == ("store_true", "boolean_optional")
    assert flags["overlap"]["aliases"] == ["--no-overlap"]
    assert flags["model_path"]["type"] is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [(RunResult(1, "", "Traceback"), "--help: rc 1"), (RunResult(-9, "", "", True), "--help: no answer in 120 s")],
)
def test_help_that_fails_leaves_unknown(tmp_path: Path, answer: RunResult, said: str) -> None:
    site = tree(tmp_path, {"sglang/srt/server_args.py": "NEW_LAYOUT = 1"})
    venv = {"path": site, "python": f"{site}/bin/python"}
    context = Context(run=Recorder(answer), venv=venv, sglang={"path": f"{site}/sglang"})
    result = _server_args.gather(context)
    assert result["state"] == "unknown"
    assert said in result["problem"]


def test_help_is_not_run_where_the_source_can_be_read_or_sglang_is_absent(classic: str) -> None:
    runner = Recorder(RunResult(1, "", ""))
    context = Context(run=runner, venv={"python": "/v/bin/python"}, sglang={"path": f"{classic}/sglang"})
    assert _server_args.gather(context) == _server_args.compact(_server_args.read_server_args(classic))
    assert _server_args.gather(Context(run=runner, sglang={"version": None, "path": None}))["state"] == "absent"
    assert runner.calls == []


def test_compact_loses_nothing(classic: str, tmp_path: Path) -> None:
    full = _server_args.read_server_args(classic)
    small = _server_args.compact(full)
    assert _server_args.expand(small) == full
    assert _server_args.expand(full) == full
    assert "choices" not in small["flags"]["quiet"]
    assert len(json.dumps(small)) < len(json.dumps(full)) * 0.7


@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("tp_size", "exact", {"flag": "--tp-size", "key": "tp_size"}),
        ("tp-size", "exact", {"flag": "--tp-size"}),
        ("--tp-size", "exact", {"flag": "--tp-size"}),
        ("tensor_parallel_size", "alias", {"flag": "--tp-size"}),
        ("ep", "alias", {"flag": "--ep-size"}),
        ("tp", "abbreviation", {"flag": "--tp-size"}),
        ("over", "ambiguous", {"candidates": ["--overlap", "--override"]}),
        ("rope", "ambiguous", {"candidates": ["--rope-alpha", "--rope-beta"]}),
        ("no_overlap", "alias", {"flag": "--no-overlap", "negated": True, "key": "overlap"}),
        ("old_mode", "deprecated", {"replacement": "--mode", "removed": False}),
        ("reasoning_parzer", "unknown", {"near": ["--reasoning-parser"]}),
        ("completely-different", "unknown", {"near": []}),
        ("-", "unknown", {}),
        ("", "unknown", {}),
    ],
)
def test_resolve_flag(classic: str, name: str, kind: str, more: dict) -> None:
    found = _server_args.resolve_flag(_server_args.read_server_args(classic), name)
    assert found["kind"] == kind
    assert more.items() <= found.items()


def test_resolve_flag_judges_nothing_it_could_not_read() -> None:
    assert _server_args.resolve_flag({"state": "unknown", "flags": {}}, "tp_size") == {
        "kind": "unverified",
        "key": "tp_size",
        "flag": "--tp-size",
    }


def test_resolve_flag_works_on_the_compact_form(classic: str) -> None:
    full = _server_args.read_server_args(classic)
    small = _server_args.compact(full)
    for name in ("tp", "tp_size", "quiet", "no-overlap", "old_mode", "nothing", "rope"):
        assert _server_args.resolve_flag(small, name) == _server_args.resolve_flag(full, name)


@pytest.mark.parametrize(
    ("name", "kind", "replacement"),
    [
        ("SGLANG_NEW", "known", None),
        ("SGLANG_OLD", "deprecated", "SGLANG_NEW"),
        ("SGLANG_OLDER", "deprecated", "SGLANG_NEW"),
        ("SGLANG_FORMER", "deprecated", "SGLANG_RENAMED"),
        ("SGLANG_WAIT_MS", "deprecated", "SGLANG_NEW"),
        ("SGLANG_GONE", "deprecated", None),
        ("SGL_NEW", "deprecated", "SGLANG_NEW"),
        ("SGLANG_NOWHERE_NEAR", "unknown", None),
        ("NCCL_DEBUG", "foreign", None),
    ],
)
def test_environment_variables(classic: str, name: str, kind: str, replacement: str | None) -> None:
    found = _server_args.resolve_env_var(_server_args.read_server_args(classic), name)
    assert found["kind"] == kind
    assert found.get("replacement") == replacement


def test_environment_variables_near_and_without_a_registry(classic: str) -> None:
    known = _server_args.read_server_args(classic)
    assert _server_args.resolve_env_var(known, "SGLANG_DISPATCH_TOKEN")["near"] == ["SGLANG_DISPATCH_TOKENS"]
    assert known["env_vars"] == ["SGLANG_NEW", "SGLANG_DISPATCH_TOKENS", "SGLANG_RENAMED"]
    assert known["env_vars_deprecated"]["SGLANG_GONE"]["message"] == "Use '--a2a' instead."
    assert known["env_vars_deprecated"]["SGLANG_OLD"]["transform"] == "_invert"
    assert "transform" not in known["env_vars_deprecated"]["SGLANG_GONE"]
    Path(classic, "sglang/srt/environ.py").unlink()
    bare = _server_args.read_server_args(classic)
    assert _server_args.resolve_env_var(bare, "SGLANG_NEW")["kind"] == "unverified"


_PIECES = [
    "class ServerArgs:\n",
    "    x: A[int, 'h'] = 1\n",
    "    y: A[1:2] = z\n",
    "    z: A['int |', 'h'] = 1\n",
    "    def add_cli_args(parser):\n",
    "        parser.add_argument(",
    "'--model-path'",
    ", choices=X",
    ", action=Y",
    ")\n",
    "        for a, b in q: pass\n",
    "        f(parser)\n",
    "def f(parser):\n    f(parser)\n",
    "_INPUT_NAMESPACES = [X, 1]\n",
    "from . import *\n",
    "from sglang.srt.server_args import X\n",
    "X = X\n",
    "X = [i for i in X]\n",
    "X = 1 << 999999\n",
    "X = 'a' * 10**9\n",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=14).map("".join) | st.text(max_size=200))
def test_hostile_source_never_raises(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    site = tmp_path_factory.mktemp("hostile")
    tree(site, {"sglang/srt/server_args.py": text.encode("utf-8", "replace").decode(), "sglang/srt/environ.py": ""})
    assert _server_args.read_server_args(str(site))["state"] in ("ok", "unknown")


@given(st.text(max_size=400))
def test_hostile_help_and_names_never_raise(text: str) -> None:
    flags = _server_args.parse_help(text)
    found = _server_args.resolve_flag({"state": "ok", "flags": flags}, text)
    assert found["kind"] in ("exact", "alias", "abbreviation", "ambiguous", "unknown")


def wheel(version: str) -> Path:
    """The wheel of an SGLang version from the cache, downloaded when it is not there."""
    found = sorted(CACHE.glob(f"sglang-{version}-*.whl"))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), f"sglang=={version}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        found = sorted(CACHE.glob(f"sglang-{version}-*.whl"))
        if not found:
            pytest.skip(f"no wheel of sglang {version}: {done.stderr.strip()[-200:]}")
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("version", sorted(REAL, key=lambda v: [int(p) for p in v.split(".")[:3]]))
def test_every_version_equals_the_real_argparse(version: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel(version)) as archive:
        names = [name for name in archive.namelist() if name.startswith("sglang/") and name.endswith(".py")]
        unused = ("/models/", "/layers/", "/multimodal_gen/", "/test/")
        archive.extractall(tmp_path, [name for name in names if not any(part in name for part in unused)])
    read = _server_args.read_actions(str(tmp_path))
    assert differences(read["actions"], REAL[version]) == []
    assert read["unresolved"] == []
    assert [action["option_strings"] for action in read["actions"] if action["unresolved"]] == []
    result = _server_args.read_server_args(str(tmp_path), version)
    assert result["flags"]["tp_size"]["flag"] == "--tp-size"
    assert {"SGLANG_USE_MODELSCOPE"} <= set(result["env_vars"])
    every = {option for action in REAL[version] for option in action["option_strings"]}
    assert {o for e in result["flags"].values() for o in (e["flag"], *e["aliases"])} == every
