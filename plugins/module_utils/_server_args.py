# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: what the installed SGLang accepts, read from its source without importing it.

SGLang has declared its launch arguments in three layouts so far:

* ``add_argument``: a dataclass of defaults and one ``parser.add_argument`` call for each flag (through 0.5.13);
* ``annotated``: dataclass fields ``name: A[type, Arg(...)] = default`` (0.5.14 to 0.5.19);
* ``namespaces``: the same fields spread over structs that ``_INPUT_NAMESPACES`` lists (from 0.5.20).

One evaluator of literals, names, enums and comprehensions serves all of them; what it cannot evaluate is recorded
as unresolved, never guessed.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils._as_owner import run_as_owner
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context

_SERVER_ARGS = "sglang.srt.server_args"
_ENVIRON = "sglang.srt.environ"
_DEPTH = 40
_CONSTANTS = {"argparse.SUPPRESS": "==SUPPRESS==", "sys.maxsize": (1 << 63) - 1}
_BUILTIN_ACTIONS = {"store", "store_true", "store_false", "store_const", "append", "append_const", "extend", "count"}
_NO_VALUE = {"store_true", "store_false", "store_const", "append_const", "count", "boolean_optional"}
# What SGLang's own conversion functions make of a value; ``parser`` names the function.
_PARSER_TYPES = {"loads": "json", "json_list_type": "json", "human_readable_int": "int", "nullable_str": "str"}
_PLAIN_TYPES = ("str", "int", "float", "bool")
_ENV_NAME = re.compile(r"[A-Z][A-Z0-9_]{2,}\Z")
_HELP_DEPRECATED = re.compile(r"\W*(?:deprecated|\[deprecated\])", re.IGNORECASE)
_HELP_REPLACEMENT = re.compile(r"\buse (?:the )?['\"`]?(--[a-z][\w-]*(?:[= ](?:<[\w-]+>|[\w-]+))?)", re.IGNORECASE)


class Unresolved(Exception):
    """An expression that cannot be evaluated without running SGLang."""


class _Class:
    def __init__(self, node: ast.ClassDef, module: _Module) -> None:
        self.node, self.module = node, module

    def attributes(self) -> dict[str, ast.expr]:
        return dict(_assignments(self.node.body))

    def is_enum(self) -> bool:
        return any(_last(base).endswith("Enum") for base in self.node.bases)


class _Function:
    def __init__(self, node: ast.FunctionDef, module: _Module) -> None:
        self.node, self.module = node, module


class _Member:
    """A member of an enum."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value


class _Module:
    def __init__(self, sources: Sources, name: str, text: str, package: bool = False) -> None:
        self.sources, self.name = sources, name
        # What one leading dot of a relative import means: the package itself, or the module's parent.
        self.levels = [*name.split("."), "__init__"] if package else name.split(".")
        self.body = ast.parse(text).body
        self.names: dict[str, Any] = {}
        self.stars: list[str] = []
        self._bind(self.body)

    def _bind(self, body: Iterable[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                self.names[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    package = self.levels[: -node.level]
                    base = ".".join([*package, base] if base else package)
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append(base)
                    else:
                        self.names[alias.asname or alias.name] = ("from", base, alias.name)
            elif isinstance(node, ast.If):
                self._bind(node.orelse)
                self._bind(node.body)
            elif isinstance(node, ast.Try):
                self._bind(node.body)
            else:
                self.names.update(_assignments([node]))


class Sources:
    """The modules of an installed package, parsed when they are first asked for."""

    def __init__(self, site_packages: str) -> None:
        self.site_packages = site_packages
        self.modules: dict[str, Optional[_Module]] = {}

    def module(self, name: str) -> Optional[_Module]:
        """The module ``name``, or None where it is absent or not Python that this interpreter can parse."""
        if name not in self.modules:
            self.modules[name] = None
            base = os.path.join(self.site_packages, *name.split("."))
            for path, package in ((base + ".py", False), (os.path.join(base, "__init__.py"), True)):
                try:
                    with open(path, encoding="utf-8") as stream:
                        self.modules[name] = _Module(self, name, stream.read(), package)
                    break
                except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                    continue
        return self.modules[name]

    def find(self, module: _Module, name: str, depth: int = 0) -> tuple[Any, _Module]:
        """The node that ``name`` is bound to in ``module``, and the module that it was found in."""
        bound = module.names.get(name)
        if depth > _DEPTH:
            raise Unresolved(name)
        if bound is None:
            for star in map(self.module, module.stars):
                if star is not None:
                    try:
                        return self.find(star, name, depth + 1)
                    except Unresolved:
                        continue
            raise Unresolved(name)
        if not isinstance(bound, tuple):
            return bound, module
        source = self.module(bound[1])
        if source is None:
            raise Unresolved(f"{bound[1]}.{bound[2]}")
        return self.find(source, bound[2], depth + 1)


def _assignments(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "?")
    return ".".join(reversed(parts))


def _last(node: ast.AST) -> str:
    return "<lambda>" if isinstance(node, ast.Lambda) else _dotted(node).rsplit(".", 1)[-1]


class _Scope:
    """Evaluates expressions of one module; ``local`` holds values that are known already."""

    def __init__(self, module: _Module, local: Optional[Mapping[str, Any]] = None, defaults: Any = None) -> None:
        self.module = module
        self.local = dict(local or {})
        self.defaults: dict[str, Any] = {} if defaults is None else defaults
        self.depth = 0

    def of(self, module: _Module, local: Optional[Mapping[str, Any]] = None) -> _Scope:
        scope = _Scope(module, local, self.defaults)
        scope.depth = self.depth + 1
        if scope.depth > _DEPTH:
            raise Unresolved("too deep")
        return scope

    def value(self, node: ast.AST) -> Any:
        """The value of an expression, in plain types; raises Unresolved."""
        method = getattr(self, "_" + type(node).__name__.lower(), None)
        if method is None:
            raise Unresolved(type(node).__name__)
        try:
            return method(node)
        except (TypeError, KeyError, IndexError, AttributeError, ValueError, ZeroDivisionError) as error:
            raise Unresolved(f"{type(error).__name__}: {error}") from error

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _sequence(self, node: Any) -> list[Any]:
        out: list[Any] = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                out.extend(self.iterate(element.value))
            else:
                out.append(self.value(element))
        return out

    _list = _tuple = _sequence

    def _set(self, node: ast.Set) -> list[Any]:
        return list(dict.fromkeys(self._sequence(node)))

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values):
            if key is None:
                out.update(self.value(value))
            else:
                out[self.value(key)] = self.value(value)
        return out

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.USub):
            return -value
        if isinstance(node.op, ast.Not):
            return not value
        raise Unresolved("operator")

    def _binop(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub) and not isinstance(left, list):
            return left - right
        if isinstance(node.op, ast.Sub):
            return [item for item in left if item not in right]
        if isinstance(node.op, ast.Mult) and isinstance(left, (int, float)) and isinstance(right, (int, float)):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
        if isinstance(node.op, ast.LShift) and 0 <= right < 64:
            return left << right
        if isinstance(node.op, ast.BitOr):
            return list(dict.fromkeys([*left, *right])) if isinstance(left, list) else left | right
        raise Unresolved("operator")

    def _joinedstr(self, node: ast.JoinedStr) -> str:
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                text += str(self.value(part.value))
        return text

    def _name(self, node: ast.Name) -> Any:
        if node.id in self.local:
            value = self.local[node.id]
            if isinstance(value, Unresolved):
                raise value
            return value
        return self._bound(*self.module.sources.find(self.module, node.id))

    def _bound(self, found: Any, module: _Module) -> Any:
        if isinstance(found, ast.ClassDef):
            return _Class(found, module)
        if isinstance(found, ast.FunctionDef):
            return _Function(found, module)
        return self.of(module).value(found)

    def _attribute(self, node: ast.Attribute) -> Any:
        if _dotted(node) in _CONSTANTS:
            return _CONSTANTS[_dotted(node)]
        if _dotted(node.value) == "ServerArgs" and node.attr in self.defaults:
            return self._known_default(node.attr)
        owner = self.value(node.value)
        if isinstance(owner, _Member):
            if node.attr in ("name", "value"):
                return getattr(owner, node.attr)
        elif isinstance(owner, _Class):
            if node.attr == "__doc__":
                return ast.get_docstring(owner.node, clean=False)
            for member in self.members(owner):
                if member.name == node.attr:
                    return member
            return self.of(owner.module, self._class_names(owner)).value(owner.attributes()[node.attr])
        raise Unresolved(_dotted(node))

    def _class_names(self, owner: _Class) -> dict[str, Any]:
        names: dict[str, Any] = {}
        for name, node in owner.attributes().items():
            if isinstance(node, ast.Dict):
                continue
            try:
                names[name] = self.of(owner.module, names).value(node)
            except Unresolved as error:
                names[name] = error
        return names

    def _known_default(self, name: str) -> Any:
        value = self.defaults[name]
        if isinstance(value, Unresolved):
            raise value
        return value

    def members(self, owner: _Class) -> list[_Member]:
        """The members of an enum class, in order; nothing for other classes."""
        if not owner.is_enum():
            return []
        out: list[_Member] = []
        for name, node in owner.attributes().items():
            try:
                value = self.of(owner.module, {m.name: m.value for m in out}).value(node)
            except Unresolved:
                value = None
            out.append(_Member(name, value))
        return out

    def iterate(self, node: ast.AST) -> list[Any]:
        """The elements of an iterable expression; of a dict only its keys are evaluated."""
        keys = self._keys(node)
        if keys is not None:
            return keys
        value = self.value(node)
        if isinstance(value, _Class):
            members = self.members(value)
            if members:
                return members
            raise Unresolved(value.node.name)
        return list(value)

    def _keys(self, node: ast.AST) -> Optional[list[Any]]:
        """The keys of an expression that is (or names) a dict display, else None."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys":
            return self.iterate(node.func.value)
        scope: _Scope = self
        if isinstance(node, ast.Name) and node.id not in self.local:
            found, module = self.module.sources.find(self.module, node.id)
            node, scope = found, self.of(module)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self.value(node.value)
            if not isinstance(owner, _Class) or owner.is_enum():
                return None
            node, scope = owner.attributes().get(node.attr, node), self.of(owner.module)
        if not isinstance(node, ast.Dict):
            return None
        out: list[Any] = []
        for key, value in zip(node.keys, node.values):
            out.extend(scope.iterate(value) if key is None else [scope.value(key)])
        return list(dict.fromkeys(out))

    def _subscript(self, node: ast.Subscript) -> Any:
        return self.value(node.value)[self.value(node.slice)]

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.value(node.test) else node.orelse)

    def _listcomp(self, node: Any) -> list[Any]:
        if len(node.generators) != 1 or not isinstance(node.generators[0].target, ast.Name):
            raise Unresolved("comprehension")
        generator = node.generators[0]
        out = []
        for item in self.iterate(generator.iter):
            scope = self.of(self.module, dict(self.local, **{generator.target.id: item}))
            if all(scope.value(test) for test in generator.ifs):
                out.append(scope.value(node.elt))
        return out

    _setcomp = _generatorexp = _listcomp

    def _compare(self, node: ast.Compare) -> bool:
        if len(node.ops) != 1:
            raise Unresolved("comparison")
        left, right = self.value(node.left), self.value(node.comparators[0])
        operator = node.ops[0]
        if isinstance(operator, (ast.Eq, ast.Is)):
            return bool(left == right)
        if isinstance(operator, (ast.NotEq, ast.IsNot)):
            return bool(left != right)
        if isinstance(operator, ast.In):
            return left in right
        if isinstance(operator, ast.NotIn):
            return left not in right
        raise Unresolved("comparison")

    def _call(self, node: ast.Call) -> Any:
        name = _last(node.func)
        if isinstance(node.func, ast.Name) and name in ("list", "tuple", "set", "frozenset", "sorted"):
            items = self.iterate(node.args[0]) if node.args else []
            return sorted(items) if name == "sorted" else list(items)
        if isinstance(node.func, ast.Name) and name in ("str", "int", "float", "len") and len(node.args) == 1:
            converters: dict[str, Callable[[Any], Any]] = {"str": str, "int": int, "float": float, "len": len}
            return converters[name](self.value(node.args[0]))
        if name in ("dict",) and not node.args and not node.keywords:
            return {}
        if name == "keys":
            return self.iterate(node)
        if name in ("lower", "upper", "strip") and isinstance(node.func, ast.Attribute) and not node.args:
            return getattr(str, name)(self.value(node.func.value))
        if name == "field":
            return self._field(node)
        if name == "_declared_default":
            return self._known_default(self.value(node.args[0]))
        if name == "get" and isinstance(node.func, ast.Attribute) and not node.args:
            raise Unresolved("environment")
        called = self.value(node.func)
        if isinstance(called, _Function) and not node.args and not node.keywords:
            return self._result_of(called)
        raise Unresolved(_dotted(node.func))

    def _field(self, node: ast.Call) -> Any:
        for keyword in node.keywords:
            if keyword.arg == "default":
                return self.value(keyword.value)
            if keyword.arg == "default_factory":
                factory = keyword.value
                if isinstance(factory, ast.Lambda):
                    return self.value(factory.body)
                if _last(factory) in ("list", "dict"):
                    return [] if _last(factory) == "list" else {}
                raise Unresolved(_last(factory))
        raise Unresolved("field")

    def _result_of(self, function: _Function) -> Any:
        """What a helper without arguments returns at its end: earlier returns depend on what is loaded already."""
        inner = _Module.__new__(_Module)
        inner.sources, inner.name, inner.body = function.module.sources, function.module.name, function.node.body
        inner.levels = function.module.levels
        inner.names, inner.stars = dict(function.module.names), function.module.stars
        inner._bind(function.node.body)
        for statement in reversed(function.node.body):
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self.of(inner).value(statement.value)
        raise Unresolved(function.node.name)


def _action(**known: Any) -> dict[str, Any]:
    action: dict[str, Any] = {
        "option_strings": [],
        "dest": None,
        "nargs": None,
        "const": None,
        "default": None,
        "type": None,
        "choices": None,
        "required": False,
        "action": "store",
        "class": None,
        "help": "",
        "new_flag": None,
        "error_message": None,
        "const_value": None,
        "unresolved": [],
    }
    action.update(known)
    return action


class _Reader:
    def __init__(self, site_packages: str) -> None:
        self.sources = Sources(site_packages)
        self.defaults: dict[str, Any] = {}
        self.actions: list[dict[str, Any]] = []
        self.fields: list[str] = []
        self.unresolved: list[str] = []
        self.layout = "unknown"

    def read(self) -> None:
        module = self.sources.module(_SERVER_ARGS)
        if module is None:
            raise Unresolved("sglang/srt/server_args.py is absent or cannot be parsed")
        # The name can be bound again later in the module, to a struct that is made from the class.
        node = next((n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs"), None)
        if node is None:
            raise Unresolved("no class ServerArgs")
        registration = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "add_cli_args"), None)
        if registration is None:
            raise Unresolved("no ServerArgs.add_cli_args")
        namespaces = module.names.get("_INPUT_NAMESPACES")
        classes = [_Class(node, module)]
        if isinstance(namespaces, (ast.List, ast.Tuple)):
            scope = _Scope(module)
            classes = [found for found in map(scope.value, namespaces.elts) if isinstance(found, _Class)]
            if len(classes) != len(namespaces.elts):
                raise Unresolved("_INPUT_NAMESPACES")
            self.layout = "namespaces"
        self._fields(classes)
        self._statements(registration.body, _Scope(module, None, self.defaults))
        if self.layout == "unknown":
            self.layout = "annotated" if any(a.get("declared") for a in self.actions) else "add_argument"

    def _fields(self, classes: list[_Class]) -> None:
        """Defaults of all fields, and the flags of the annotated ones; a field declared again replaces the first."""
        declared: dict[str, dict[str, Any]] = {}
        for owner in classes:
            scope = _Scope(owner.module)
            for statement in owner.node.body:
                if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                    continue
                name = statement.target.id
                self.fields.append(name)
                if statement.value is not None:
                    try:
                        self.defaults[name] = scope.value(statement.value)
                    except Unresolved as error:
                        self.defaults[name] = error
                action = self._declared(name, statement, scope)
                if action is not None:
                    declared[name] = action
        self.actions.extend(action for action in declared.values() if action)

    def _declared(self, name: str, field: ast.AnnAssign, scope: _Scope) -> Optional[dict[str, Any]]:
        """The flag of an annotated field; an empty dict for a field that has none on purpose."""
        annotation = field.annotation
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if not isinstance(annotation, ast.Subscript) or _last(annotation.value) not in ("A", "Annotated"):
            return None
        elements = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        arguments: Optional[dict[str, ast.expr]] = None
        for element in elements[1:]:
            if isinstance(element, ast.Call) and _last(element.func) == "Arg":
                arguments = {keyword.arg: keyword.value for keyword in element.keywords if keyword.arg}
                if element.args:
                    arguments.setdefault("help", element.args[0])
                break
            if isinstance(element, (ast.JoinedStr, ast.BinOp)) or (
                isinstance(element, ast.Constant) and isinstance(element.value, str)
            ):
                arguments = {"help": element}
                break
        if arguments is None:
            return None
        if "no_cli" in arguments and scope.value(arguments["no_cli"]):
            return {}
        action = _action(dest=name, declared=True)

        def get(key: str, default: Any = None) -> Any:
            return self._evaluate(action, scope, key, arguments[key], default) if key in arguments else default

        flag = get("cli_name") or "--" + name.replace("_", "-")
        action["option_strings"] = [flag, *(get("aliases") or [])]
        action["help"] = get("help", "")
        has_default = name in self.defaults and field.value is not None
        if has_default:
            action["default"] = self._default(action, name)
        parser = _last(arguments["type_parser"]) if "type_parser" in arguments else None
        if parser == "?":
            parser = None
        if "action" in arguments:
            self._set_action(action, arguments["action"], scope)
            extra = arguments.get("action_kwargs")
            keywords = {}
            if isinstance(extra, ast.Dict):
                keywords = {scope.value(k): v for k, v in zip(extra.keys, extra.values) if k is not None}
            elif isinstance(extra, ast.Call):
                keywords = {k.arg: k.value for k in extra.keywords if k.arg}
            self._keywords(action, keywords, scope)
            self._finish(action, given={*keywords, *(["default"] if has_default else [])})
            return action
        kind, literals, element_type = _annotated_type(elements[0])
        action["choices"] = get("choices")
        action["nargs"] = get("nargs")
        action["const"] = get("const")
        if literals is not None:
            action["choices"] = action["choices"] or literals
            action["type"] = parser or _plain(type(literals[0]).__name__ if literals else "str")
            action["nargs"] = None
        elif kind == "list" and parser is None:
            action["nargs"] = action["nargs"] or "+"
            action["type"] = _plain(element_type or "str")
        elif kind == "bool":
            action.update(action="store_true", choices=None, nargs=None)
        else:
            action["type"] = parser or _plain(kind)
            required = get("required")
            action["required"] = bool(required or (required is None and not has_default))
        self._finish(action, given={"default"} if has_default else set())
        return action

    def _default(self, action: dict[str, Any], name: str) -> Any:
        value = self.defaults[name]
        if isinstance(value, Unresolved):
            action["unresolved"].append(f"default: {value}")
            return None
        return value.value if isinstance(value, _Member) else value

    def _evaluate(self, action: dict[str, Any], scope: _Scope, key: str, node: ast.expr, default: Any = None) -> Any:
        try:
            value = scope.iterate(node) if key == "choices" else scope.value(node)
        except Unresolved as error:
            if key != "help":
                action["unresolved"].append(f"{key}: {error}")
            return default
        if isinstance(value, list):
            return [item.value if isinstance(item, _Member) else item for item in value]
        return value.value if isinstance(value, _Member) else value

    def _statements(self, body: Iterable[ast.stmt], scope: _Scope) -> None:
        for statement in body:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
                if isinstance(target, ast.Name):
                    try:
                        scope.local[target.id] = scope.value(statement.value)
                    except Unresolved as error:
                        scope.local[target.id] = error
            elif isinstance(statement, ast.If):
                self._condition(statement, scope)
            elif isinstance(statement, ast.For):
                self._loop(statement, scope)
            elif isinstance(statement, (ast.With, ast.Try)):
                self._statements(statement.body, scope)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._called(statement.value, scope)

    def _condition(self, statement: ast.If, scope: _Scope) -> None:
        try:
            self._statements(statement.body if scope.value(statement.test) else statement.orelse, scope)
        except Unresolved:
            # A branch that depends on the environment: flags that only it has are told apart.
            before = len(self.actions)
            for branch in (statement.body, statement.orelse):
                self._statements([s for s in branch if not isinstance(s, ast.Expr) or _adds_argument(s)], scope)
            for action in self.actions[before:]:
                action["unresolved"].append("conditional")

    def _loop(self, statement: ast.For, scope: _Scope) -> None:
        try:
            items = scope.iterate(statement.iter)
        except Unresolved as error:
            self.unresolved.append(f"loop: {error}")
            return
        for item in items:
            if isinstance(statement.target, ast.Name):
                scope.local[statement.target.id] = item
            elif isinstance(statement.target, ast.Tuple) and isinstance(item, (list, tuple)):
                for target, part in zip(statement.target.elts, item):
                    if isinstance(target, ast.Name):
                        scope.local[target.id] = part
            self._statements(statement.body, scope)

    def _called(self, call: ast.Call, scope: _Scope) -> None:
        name = _last(call.func)
        if name == "add_argument":
            self._added(call, scope)
        elif name == "add_cli_args_from_dataclass":
            return
        elif any(isinstance(argument, ast.Name) and "parser" in argument.id for argument in call.args):
            try:
                called = scope.value(call.func)
            except Unresolved as error:
                called = error
            if isinstance(called, _Function):
                self._statements(called.node.body, _Scope(called.module, None, self.defaults))
            else:
                self.unresolved.append(f"call of {_dotted(call.func)}")

    def _added(self, call: ast.Call, scope: _Scope) -> None:
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        action = _action()
        try:
            action["option_strings"] = [scope.value(argument) for argument in call.args]
        except Unresolved as error:
            self.unresolved.append(f"flag: {error}")
            return
        if not action["option_strings"] or not all(isinstance(o, str) for o in action["option_strings"]):
            self.unresolved.append("flag without a name")
            return
        if "action" in keywords:
            self._set_action(action, keywords.pop("action"), scope)
        self._keywords(action, keywords, scope)
        self._finish(action, given=set(keywords))
        self.actions.append(action)

    def _keywords(self, action: dict[str, Any], keywords: Mapping[str, ast.expr], scope: _Scope) -> None:
        for key, node in keywords.items():
            if key == "type":
                action["type"] = _last(node)
            elif key in action:
                action[key] = self._evaluate(action, scope, key, node)

    def _set_action(self, action: dict[str, Any], node: ast.expr, scope: _Scope) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            action["action"] = node.value
            return
        name = _last(node)
        if name == "BooleanOptionalAction":
            action["action"] = "boolean_optional"
            return
        action["class"] = name
        try:
            found = scope.value(node)
        except Unresolved as error:
            action["unresolved"].append(f"action: {error}")
            return
        if isinstance(found, _Class):
            action["signature"] = _constructor_defaults(found, scope)

    def _finish(self, action: dict[str, Any], given: Iterable[str]) -> None:
        given = set(given)
        kind = action["action"]
        for key, value in action.pop("signature", {}).items():
            if key in ("nargs", "const", "default") and key not in given:
                action[key] = value
        if kind in ("store_true", "store_false"):
            action.update(nargs=0, const=kind == "store_true", type=None)
            if "default" not in given:
                action["default"] = kind == "store_false"
        elif kind == "boolean_optional":
            action.update(nargs=0, type=None)
            names = action["option_strings"]
            action["option_strings"] = [
                name for flag in names for name in ([flag, "--no-" + flag[2:]] if flag[:2] == "--" else [flag])
            ]
        elif kind in ("store_const", "append_const", "count"):
            action["nargs"] = 0
        elif kind not in _BUILTIN_ACTIONS:
            action["unresolved"].append(f"action: {kind}")
        if action["dest"] is None:
            flags = action["option_strings"]
            name = next((flag for flag in flags if flag.startswith("--")), flags[0])
            action["dest"] = name.lstrip("-").replace("-", "_")


def _adds_argument(statement: ast.Expr) -> bool:
    return isinstance(statement.value, ast.Call) and _last(statement.value.func) == "add_argument"


def _plain(name: str) -> str:
    return name if name in ("str", "int", "float") else "str"


def _constructor_defaults(owner: _Class, scope: _Scope) -> dict[str, Any]:
    for node in owner.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            names = [argument.arg for argument in node.args.args]
            pairs = list(zip(names[len(names) - len(node.args.defaults) :], node.args.defaults))
            pairs += [(a.arg, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults) if d is not None]
            out = {}
            for name, default in pairs:
                try:
                    out[name] = scope.of(owner.module).value(default)
                except Unresolved:
                    continue
            return out
    return {}


def _annotated_type(node: ast.AST) -> tuple[str, Optional[list[Any]], Optional[str]]:
    """The kind of an annotation (``str``, ``int``, ``float``, ``bool``, ``list``), its literals, its element type."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.Subscript):
        head = _last(node.value)
        inner = node.slice
        if head == "Optional":
            return _annotated_type(inner)
        if head == "Union":
            return _only(inner.elts if isinstance(inner, ast.Tuple) else [inner])
        if head == "Literal":
            elements = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return "literal", [e.value for e in elements if isinstance(e, ast.Constant)], None
        if head in ("List", "list"):
            return "list", None, _last(inner)
        return "str", None, None
    if isinstance(node, ast.BinOp):
        parts: list[ast.AST] = []
        stack: list[ast.AST] = [node]
        while stack:
            part = stack.pop()
            if isinstance(part, ast.BinOp):
                stack += [part.left, part.right]
            else:
                parts.append(part)
        return _only(parts)
    name = _last(node)
    if name in ("List", "list"):
        return "list" if name == "List" else "str", None, None
    return (name if name in _PLAIN_TYPES else "str"), None, None


def _only(parts: Iterable[ast.AST]) -> tuple[str, Optional[list[Any]], Optional[str]]:
    kinds = [part for part in parts if not (isinstance(part, ast.Constant) and part.value is None)]
    return _annotated_type(kinds[0]) if len(kinds) == 1 else ("str", None, None)


def read_actions(site_packages: str) -> dict[str, Any]:
    """Every launch argument of the SGLang below ``site_packages``, as argparse would hold it.

    Returns ``{layout, fields: [name], unresolved: [text], actions: [{option_strings, dest, nargs, const, default,
    type, choices, required, action, class, new_flag, error_message, const_value, help, unresolved}]}``; ``fields``
    are those of ServerArgs, ``type`` is the name of the conversion function. Raises Unresolved for a layout that is
    not known.
    """
    reader = _Reader(site_packages)
    reader.read()
    if not any("--model-path" in action["option_strings"] for action in reader.actions):
        raise Unresolved(f"no --model-path among {len(reader.actions)} flags")
    return {
        "layout": reader.layout,
        "actions": reader.actions,
        "fields": reader.fields,
        "unresolved": reader.unresolved,
    }


def read_env_vars(sources: Sources) -> dict[str, Any]:
    """The environment variables that ``srt/environ.py`` declares.

    Returns ``{env_vars: [name], env_vars_deprecated: {old: {replacement, message, transform}}}``. ``transform`` is
    there where the value changes too, and names SGLang's function. Both are empty for versions without that file.
    SGLang also reads a few variables elsewhere: a name that is not listed need not be wrong.
    """
    module = sources.module(_ENVIRON)
    if module is None:
        return {"env_vars": [], "env_vars_deprecated": {}}
    names: list[str] = []
    deprecated: dict[str, dict[str, Any]] = {}
    envs = module.names.get("Envs")
    if isinstance(envs, ast.ClassDef):
        for name, node in _assignments(envs.body):
            if _ENV_NAME.match(name):
                names.append(name)
                for keyword in node.keywords if isinstance(node, ast.Call) else []:
                    if keyword.arg == "deprecated_name" and isinstance(keyword.value, ast.Constant):
                        deprecated[str(keyword.value.value)] = {"replacement": name, "message": ""}
    for statement in module.body:
        if isinstance(statement, ast.ClassDef) and statement.name == "Envs":
            continue
        for found in ast.walk(statement):
            if isinstance(found, ast.Dict):
                deprecated.update(_deprecated_table(found))
            elif isinstance(found, ast.Call):
                deprecated.update(_deprecation_call(found, module))
    return {"env_vars": names, "env_vars_deprecated": {k: v for k, v in deprecated.items() if _ENV_NAME.match(k)}}


def _deprecated_table(node: ast.Dict) -> dict[str, dict[str, Any]]:
    """Rows of a table of deprecated names: ``OLD: NEW`` or ``OLD: _DeprecatedEnv(replacement=..., note=...)``."""
    out: dict[str, dict[str, Any]] = {}
    for key, value in zip(node.keys, node.values):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str) or not _ENV_NAME.match(key.value):
            return {}
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and _ENV_NAME.match(value.value):
            out[key.value] = {"replacement": value.value, "message": ""}
        elif isinstance(value, ast.Call) and "eprecated" in _last(value.func):
            texts = {k.arg: _text(k.value) for k in value.keywords}
            out[key.value] = {"replacement": texts.get("replacement") or None, "message": texts.get("note") or ""}
            change = next((_last(k.value) for k in value.keywords if k.arg == "transform"), None)
            if change:
                # The value means something else under the new name: its unit or its polarity changed.
                out[key.value]["transform"] = change
        else:
            return {}
    return out


def _deprecation_call(node: ast.Call, module: _Module) -> dict[str, dict[str, Any]]:
    function = module.names.get(_last(node.func))
    if not isinstance(function, ast.FunctionDef) or "deprecated" not in function.name:
        return {}
    given = {argument.arg: _text(value) for argument, value in zip(function.args.args, node.args)}
    given.update({keyword.arg: _text(keyword.value) for keyword in node.keywords if keyword.arg})
    old = given.get("old_name") or given.get("env_name")
    if not old:
        return {}
    return {old: {"replacement": given.get("new_name") or None, "message": given.get("suggestion") or ""}}


def _text(node: ast.AST) -> Optional[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return left + right if left is not None and right is not None else None
    return None


def deprecation(action: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """``{replacement, message, removed}`` of a deprecated flag, else None; ``removed``: SGLang refuses to start."""
    message = action.get("error_message") or ""
    text = str(action.get("help") or "")
    told = bool(_HELP_DEPRECATED.match(text[:40]))
    if not (action.get("new_flag") or message or told or "Deprecated" in (action.get("class") or "")):
        return None
    replacement = action.get("new_flag")
    if not replacement:
        found = _HELP_REPLACEMENT.search(message or text)
        replacement = found.group(1) if found else None
    return {"replacement": replacement, "message": message, "removed": bool(message)}


def describe(actions: Iterable[Mapping[str, Any]], fields: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Actions in the contract's shape: ``{key: {flag, aliases, type, nargs, choices, action, deprecated, ...}}``.

    The key is the field of ServerArgs that the flag sets (``tp_size`` in every version, though argparse calls it
    ``tensor_parallel_size`` in some); a further flag that sets the same field has its own name as key. ``dest`` is
    there where argparse's name differs from the key, ``default`` where it is a literal other than None, ``parser``
    where SGLang converts the value with a function of its own, ``const`` where a flag without value stores something
    but True, ``uncertain`` where choices could not all be read.
    """
    out: dict[str, dict[str, Any]] = {}
    known = set(fields)
    for action in sorted(actions, key=lambda action: deprecation(action) is not None):
        options = list(action["option_strings"])
        field = action["dest"]
        if field not in known:
            field = next((name for name in map(_key, options) if name in known), field)
        wanted = "--" + field.replace("_", "-")
        flag = wanted if wanted in options else next((o for o in options if o.startswith("--")), options[0])
        key = field if field not in out and not deprecation(action) else _key(flag)
        parser = action["type"]
        kind = action["action"]
        shown = _PARSER_TYPES.get(parser, parser if parser in _PLAIN_TYPES else "str")
        if kind == "store" and action["nargs"] == 0:
            kind = "store_true" if action["const"] is True or action["class"] == "DeprecatedAction" else "store_const"
        entry: dict[str, Any] = {
            "flag": flag,
            "aliases": [option for option in options if option != flag],
            "type": "bool" if kind in _NO_VALUE else shown,
            "nargs": action["nargs"],
            "choices": None if action["choices"] is None else list(action["choices"]),
            "action": kind,
            "deprecated": deprecation(action),
        }
        if key != action["dest"]:
            entry["dest"] = action["dest"]
        if action["default"] not in (None, False, [], "==SUPPRESS=="):
            entry["default"] = action["default"]
        if parser is not None and parser not in _PLAIN_TYPES and kind not in _NO_VALUE:
            entry["parser"] = parser
        if action["required"]:
            entry["required"] = True
        if action["const_value"] is not None:
            entry["const"] = action["const_value"]
        if any(text.startswith("choices") or text == "conditional" for text in action["unresolved"]):
            entry["uncertain"] = True
        out[key] = entry
    return out


_DEFAULTS: dict[str, Any] = {
    "aliases": [],
    "type": "str",
    "nargs": None,
    "choices": None,
    "action": "store",
    "deprecated": None,
}


def compact(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts without what :func:`expand` can put back: about a third of the bytes, for the wire."""
    flags = {}
    for key, entry in server_args.get("flags", {}).items():
        flags[key] = {
            name: value
            for name, value in entry.items()
            if not (name in _DEFAULTS and value == _DEFAULTS[name])
            and not (name == "flag" and value == "--" + key.replace("_", "-"))
            and not (entry.get("action") in _NO_VALUE and (name, value) in (("type", "bool"), ("nargs", 0)))
        }
    return dict(server_args, flags=flags)


def expand(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """The contract's full shape of a result of :func:`compact`; a full one is returned equal."""
    flags = {}
    for key, entry in server_args.get("flags", {}).items():
        full: dict[str, Any] = {"flag": "--" + key.replace("_", "-"), **_DEFAULTS}
        full["aliases"] = []
        if entry.get("action") in _NO_VALUE:
            full.update(type="bool", nargs=0)
        full.update(entry)
        flags[key] = full
    return dict(server_args, flags=flags)


_HELP_ENTRY = re.compile(r"^ {2}(-{1,2}[A-Za-z][^\n]*)$", re.MULTILINE)
_HELP_OPTION = re.compile(r"(--?[A-Za-z][\w-]*)(?: +(?!-)((?:\{[^{}]*\}|[^,{}])*?))?(?:, (?=-)|$)")


def parse_help(text: str) -> dict[str, dict[str, Any]]:
    """Flags from ``--help``: names, choices and number of values are there, types are not (``type`` is None)."""
    flags: dict[str, dict[str, Any]] = {}
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    for match in _HELP_ENTRY.finditer(text):
        # Two blanks or more end the flags and begin the text of the flag.
        head = re.split(r" {2,}", match.group(1))[0][:4000]
        options = _HELP_OPTION.findall(head)
        names = [name for name, dummy in options]
        if not names or "--help" in names:
            continue
        value = next((v.strip() for dummy, v in reversed(options) if v.strip()), "")
        found = re.search(r"\{([^{}]*)\}", value)
        positive = [name for name in names if not (name.startswith("--no-") and "--" + name[5:] in names)]
        flag = next((name for name in positive if name.startswith("--")), names[0])
        action = "store" if value else ("store_true" if len(positive) == len(names) else "boolean_optional")
        flags[_key(flag)] = {
            "flag": flag,
            "aliases": [name for name in names if name != flag],
            "type": None if value else "bool",
            "nargs": _help_nargs(value) if value else 0,
            "choices": found.group(1).split(",") if found else None,
            "action": action,
            "deprecated": None,
        }
    return flags


def _help_nargs(value: str) -> Optional[str]:
    if value.endswith("...]"):
        return "*" if value.startswith("[") else "+"
    return "?" if value.startswith("[") else None


_EMPTY: dict[str, Any] = {
    "sglang_version": None,
    "layout": None,
    "flags": {},
    "env_vars": [],
    "env_vars_deprecated": {},
    "problem": None,
}


def read_server_args(site_packages: str, version: Optional[str] = None) -> dict[str, Any]:
    """``server_args`` of contracts.md for the SGLang below ``site_packages``; ``problem`` says why it is unknown."""
    result = dict(_EMPTY, state="unknown", sglang_version=version)
    try:
        read = read_actions(site_packages)
        flags = describe(read["actions"], read["fields"])
    except (Unresolved, RecursionError, SyntaxError, ValueError, TypeError, KeyError, AttributeError) as error:
        return dict(result, problem=f"unknown layout of SGLang's arguments: {error}")
    result.update(state="ok", layout=read["layout"], flags=flags)
    if read["unresolved"]:
        result["problem"] = "some flags could not be read: " + "; ".join(read["unresolved"][:5])
    result.update(read_env_vars(Sources(site_packages)))
    return result


def gather(context: Context) -> dict[str, Any]:
    """``server_args`` of the probe, compact: read statically, else from ``--help`` in a child of the venv's Python."""
    sglang = context.sglang or {}
    if not sglang.get("path"):
        return dict(_EMPTY, state="absent")
    package = sglang["path"].rstrip("/")
    if os.path.basename(package) != "sglang":
        package = os.path.join(package, "sglang")
    result = read_server_args(context.path(os.path.dirname(package)), sglang.get("version"))
    python = context.venv.get("python") or os.path.join(context.venv.get("path") or "", "bin", "python")
    if result["state"] == "unknown" and os.path.isabs(python):
        argv = [python, "-m", "sglang.launch_server", "--help"]
        owned = [context.venv.get("path") or os.path.dirname(os.path.dirname(python))]
        helped = run_as_owner(context, argv, context.import_timeout, owned, context.environment)
        flags = parse_help(helped.stdout) if helped.rc == 0 else {}
        if "model_path" in flags:
            result.update(state="ok", layout="help", flags=flags)
        else:
            ending = f"no answer in {context.import_timeout:g} s" if helped.timed_out else f"rc {helped.rc}"
            result["problem"] = f"{result['problem']}; --help: {ending}"
    return compact(result)


def _key(option: str) -> str:
    return option.strip().lstrip("-").replace("-", "_")


def _dashed(name: str) -> str:
    return "--" + name.strip().lstrip("-").replace("_", "-")


def _options(server_args: Mapping[str, Any]) -> dict[str, str]:
    """Option string, dashes only, to key."""
    table: dict[str, str] = {}
    for key, entry in server_args.get("flags", {}).items():
        for option in (entry.get("flag") or _dashed(key), *entry.get("aliases", [])):
            table[option if not option.startswith("--") else _dashed(option)] = key
    return table


def resolve_flag(server_args: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a flag of the user means to the installed SGLang, by the rules of argparse.

    ``name`` may be written ``tp_size``, ``tp-size`` or ``--tp-size``. Returns ``{kind, key, flag, ...}``:

    * ``exact``, ``alias`` and ``abbreviation`` (unique) with the canonical long ``flag``; ``negated`` is True for the
      ``--no-x`` form of a flag;
    * ``deprecated`` with ``replacement``, ``message`` and ``removed``;
    * ``ambiguous`` with ``candidates``; ``unknown`` with ``near`` (both lists of flags);
    * ``unverified`` where the arguments of the installed SGLang could not be read.
    """
    wanted = _dashed(name)
    if server_args.get("state") != "ok":
        return {"kind": "unverified", "key": _key(wanted), "flag": wanted}
    flags = server_args["flags"]
    options = _options(server_args)
    kind, key = "exact", options.get(wanted)
    option = wanted
    if key is None and _key(name) in flags:
        key = _key(name)
        kind, option = "alias", flags[key].get("flag") or _dashed(key)
    if key is None:
        candidates = sorted(o for o in options if o.startswith(wanted)) if len(wanted) > 2 else []
        keys = {options[o] for o in candidates}
        if len(keys) > 1 or len({_is_negation(o, options) for o in candidates}) > 1:
            return {"kind": "ambiguous", "key": None, "flag": None, "candidates": candidates}
        if not keys:
            near = difflib.get_close_matches(wanted, list(options), n=3, cutoff=0.75)
            return {"kind": "unknown", "key": None, "flag": None, "near": near}
        kind, key, option = "abbreviation", keys.pop(), candidates[0]
    entry = flags[key]
    flag = entry.get("flag") or _dashed(key)
    result = {"kind": kind, "key": key, "flag": flag}
    if kind == "exact" and option != _dashed(flag):
        result["kind"] = "alias"
    if _is_negation(option, options):
        result.update(flag=option, negated=True)
    if entry.get("deprecated"):
        result.update(kind="deprecated", **entry["deprecated"])
    return result


def _is_negation(option: str, options: Mapping[str, str]) -> bool:
    positive = "--" + option[5:]
    return option.startswith("--no-") and options.get(positive) == options.get(option)


def resolve_env_var(server_args: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``{kind: known|deprecated|unknown|foreign|unverified, ...}`` of an environment variable.

    ``deprecated`` has ``replacement`` and ``message``, ``unknown`` has ``near``; ``foreign`` is a variable that is not
    named like SGLang's own.
    """
    known = server_args.get("env_vars") or []
    deprecated = server_args.get("env_vars_deprecated") or {}
    if name in deprecated:
        return dict(deprecated[name], kind="deprecated", name=name)
    if name in known:
        return {"kind": "known", "name": name}
    if not name.startswith(("SGLANG_", "SGL_")):
        return {"kind": "foreign", "name": name}
    if not known:
        return {"kind": "unverified", "name": name}
    renamed = "SGLANG_" + name[4:] if name.startswith("SGL_") else None
    if renamed in known:
        return {"kind": "deprecated", "name": name, "replacement": renamed, "message": ""}
    near = difflib.get_close_matches(renamed or name, known, n=3, cutoff=0.75)
    return {"kind": "unknown", "name": name, "near": near}
