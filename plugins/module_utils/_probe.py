# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: one whole probe of a host, in one call. Reads and imports; changes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.gpufleet.sglang.plugins.module_utils import _diagnose as diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils import _distributions as dists
from ansible_collections.gpufleet.sglang.plugins.module_utils import _elf, _venv
from ansible_collections.gpufleet.sglang.plugins.module_utils._backends import (
    BACKENDS,
    DEFAULT_BACKENDS,
    Backend,
    Built,
    Use,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._codes import CODES
from ansible_collections.gpufleet.sglang.plugins.module_utils._context import Context
from ansible_collections.gpufleet.sglang.plugins.module_utils._outcome import LIBRARIES, Account, Group, Outcome

# In this order: a subset may use the results of those before it.
SUBSETS = ("service", "gpus", "toolkits", "fabric", "backends", "server_args", "model")
DEFAULT_SUBSETS = ("backends", "server_args")


@dataclass
class Request:
    """What is asked of a probe; see the options of ``probe_info``."""

    venv: str
    subsets: Sequence[str] = DEFAULT_SUBSETS
    level: str = "auto"
    user: Optional[str] = None
    environment: Optional[Mapping[str, str]] = None
    import_timeout: float = 120.0
    command_timeout: float = 20.0
    wanted: Mapping[str, Sequence[str]] = field(default_factory=dict)
    backends: Sequence[str] = ()
    revisions: Mapping[str, str] = field(default_factory=dict)
    model_path: Optional[str] = None
    instance: str = "default"


def expand_subsets(asked: Sequence[str]) -> list[str]:
    """Subsets from names, ``all`` and ``!name``; nothing but exclusions means the default without them.

    Raises ValueError that names an unknown subset.
    """
    names = [str(item).strip() for item in asked if str(item).strip()]
    for name in names:
        if name.lstrip("!") not in (*SUBSETS, "all"):
            raise ValueError(f"unknown subset {name.lstrip('!')}: choose from all, {', '.join(SUBSETS)}")
    positive = [name for name in names if not name.startswith("!")]
    chosen = set(SUBSETS) if "all" in positive else set(positive or DEFAULT_SUBSETS)
    chosen -= {name[1:] for name in names if name.startswith("!")}
    if "!all" in names:
        chosen = set(positive)
    return [name for name in SUBSETS if name in chosen]


def check_wanted(wanted: Mapping[str, Any], backends: Sequence[str]) -> dict[str, list[str]]:
    """``wanted`` with every value a list; ValueError names an unknown backend or use and the known ones."""
    result: dict[str, list[str]] = {}
    for name in [*backends, *wanted]:
        if name not in BACKENDS:
            raise ValueError(f"unknown backend {name}: choose from {', '.join(BACKENDS)}")
    for name, uses in wanted.items():
        listed = [uses] if isinstance(uses, str) else list(uses or [])
        for use in listed:
            if use not in BACKENDS[name].uses:
                raise ValueError(f"{name} has no use {use}: choose from {', '.join(BACKENDS[name].uses)}")
        result[name] = [str(use) for use in listed]
    return result


def check_instance(name: str) -> str:
    """``name``, or ValueError where it cannot be part of a unit's name."""
    if not re.match(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", name):
        raise ValueError(f"instance {name!r} cannot be part of a unit's name: use letters, digits, _, . and -")
    return name


WHEELS = "/var/lib/gpufleet-sglang/wheels"


def _kept_wheels(context: Context) -> list[str]:
    """Fingerprints of the DeepEP wheels that an earlier build left on the host."""
    folder = context.path(WHEELS)
    if not os.path.isdir(folder):
        return []
    return sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name, "manifest.json")))


def host_facts(context: Context) -> dict[str, Any]:
    """``{hostname, machine, os_family, memory_bytes, cpus, wheels}``."""
    release = {}
    for line in (context.read("/etc/os-release") or "").splitlines():
        key, equals, value = line.partition("=")
        if equals:
            release[key.strip()] = value.strip().strip("\"'")
    ids = {release.get("ID", ""), *release.get("ID_LIKE", "").split()}
    family = "other"
    if ids & {"debian", "ubuntu"}:
        family = "debian"
    elif ids & {"rhel", "fedora", "centos", "rocky", "almalinux", "amzn", "ol"}:
        family = "redhat"
    memory = re.search(r"^MemTotal:\s*(\d+) kB", context.read("/proc/meminfo") or "", re.MULTILINE)
    name = os.uname()
    return {
        "hostname": name.nodename, "machine": name.machine, "os_family": family,
        "memory_bytes": int(memory.group(1)) * 1024 if memory else None, "cpus": os.cpu_count(),
        "wheels": _kept_wheels(context),
    }  # fmt: skip


_REQUIRED = re.compile(r"^(torch|sgl|flashinfer|nvidia-|mooncake|nixl|deep-ep|amd-mori|triton|transformers)")


def sglang_facts(paths: Sequence[str], suffixes: Sequence[str], mapping: Mapping[str, str]) -> dict[str, Any]:
    """``{version, path, editable, requires}`` of the installed SGLang, from its files; version null when absent."""
    spec = dists.resolve("sglang", paths, suffixes, mapping)
    found = dists.scan(paths, ["sglang"])
    requires: dict[str, str] = {}
    version, editable = None, False
    if found:
        version, editable = found[0].version or None, found[0].editable
        for line in found[0].metadata().requires:
            parsed = dists.parse_requirement(line)
            if parsed and "extra" not in parsed[2] and _REQUIRED.match(parsed[0]):
                requires[parsed[0]] = parsed[1]
    elif spec.folder and spec.kind == "package":
        for name in ("_version.py", "version.py"):
            text = _read(os.path.join(spec.folder, name)) or ""
            hit = re.search(r"^(?:__version__|version)(?:\s*=\s*\w+)*\s*=\s*['\"]([^'\"\n]+)['\"]", text, re.MULTILINE)
            if hit:
                version = hit.group(1)
                break
    return {"version": version, "path": spec.folder, "editable": editable, "requires": requires}


def _read(path: str, limit: int = 4 << 20) -> Optional[str]:
    try:
        with open(path, "rb") as stream:
            return stream.read(limit).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def guard_of(backend: Backend, sglang: Mapping[str, Any]) -> Optional[str]:
    """What SGLang's ``except`` clause around its unasked import of a backend takes; None where there is no such import.

    Read in the installed SGLang; where that cannot be read, from the table's versions.
    """
    if not backend.guard or not sglang.get("version"):
        return None
    text = _read(os.path.join(str(sglang.get("path") or ""), backend.guard)) if sglang.get("path") else None
    if text:
        place = re.search(
            rf"^\s*(?:from {backend.module}(?:\.\S+)? import|import {backend.module}\b)", text, re.MULTILINE
        )
        if place is None:
            return None
        clause = re.search(r"^\s*except\b\s*([^:\n]*):", text[place.end() : place.end() + 2000], re.MULTILINE)
        taken = clause.group(1) if clause else "nothing"
        if clause and (not taken.strip() or "BaseException" in taken):
            return "BaseException"
        return "Exception" if re.search(r"\bException\b", taken) else "ImportError" if clause else "nothing"
    return "ImportError" if dists.version_in(str(sglang["version"]), backend.guard_versions) else "Exception"


@dataclass
class Paths:
    """Where the venv's Python looks, in its order, and what editable finders map."""

    search: list[str]
    site: list[str]
    mapping: dict[str, str]
    python_path: list[str]


def search_paths(
    venv: Mapping[str, Any], environment: Optional[Mapping[str, str]], home: Optional[str] = None
) -> Paths:
    """The search path of the service's interpreter: PYTHONPATH, site folders, what .pth files add, the user's site."""
    site = list(venv.get("site_packages") or [])
    python_path = []
    if environment is not None:
        for entry in str(environment.get("PYTHONPATH", "")).split(":"):
            if entry and os.path.isabs(entry) and entry not in python_path:
                python_path.append(os.path.normpath(entry))
        if venv.get("system_site") and home and not environment.get("PYTHONNOUSERSITE"):
            version = ".".join(str(part) for part in _venv.python_tuple(dict(venv)))
            user_site = os.path.join(home, ".local/lib", "python" + version, "site-packages")
            if os.path.isdir(user_site):
                site.insert(0, user_site)
    hooks = dists.path_hooks(site)
    return Paths([*python_path, *site, *hooks.paths], site, hooks.mapping, python_path)


class Gatherer:
    """Collects the static evidence of the backends of one venv."""

    def __init__(self, context: Context, paths: Paths, request: Request, account: Account) -> None:
        self.context, self.paths, self.request, self.account = context, paths, request, account
        self.venv = context.venv
        self.suffixes = _venv.extension_suffixes(self.venv)
        self.loader = self._loader()
        self._verified: dict[str, diagnose.Installed] = {}
        self._private: dict[str, dict[str, str]] = {}
        self._capabilities: Optional[list[str]] = None
        self._leftovers: Optional[list[str]] = None

    def _loader(self) -> _elf.Loader:
        context = self.context
        cache: dict[str, list[str]] = {}
        try:
            with open(context.path("/etc/ld.so.cache"), "rb") as stream:
                cache = _elf.parse_ld_cache(stream.read(32 << 20))
        except OSError:
            cache = {}
        if not cache and context.root in ("", "/"):
            for ldconfig in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
                if os.path.exists(ldconfig):
                    cache = _elf.parse_ldconfig(context.run([ldconfig, "-p"], context.command_timeout).stdout)
                    break
        folders = str((context.environment or {}).get("LD_LIBRARY_PATH", "")).split(":")
        return _elf.Loader(
            self.venv.get("machine") or os.uname().machine, cache, folders, self._preloaded(), context.root
        )

    def _preloaded(self) -> list[str]:
        torch = self.context.torch.get("path")
        if not torch or not os.path.isdir(os.path.join(torch, "lib")):
            return []
        found = [os.path.join(torch, "lib")]
        for site in self.paths.search:
            base = os.path.join(site, "nvidia")
            try:
                names = sorted(os.listdir(base))
            except OSError:
                continue
            found += [p for p in (os.path.join(base, name, "lib") for name in names) if os.path.isdir(p)]
        return found

    def nvidia_libraries(self, stem: str) -> list[str]:
        """Folders nvidia/<x> of the venv whose lib has a file that begins with ``stem``."""
        found = []
        for site in self.paths.search:
            base = os.path.join(site, "nvidia")
            try:
                names = sorted(os.listdir(base))
            except OSError:
                continue
            for name in names:
                try:
                    files = os.listdir(os.path.join(base, name, "lib"))
                except OSError:
                    continue
                if any(file.startswith(stem) for file in files):
                    found.append(os.path.join(base, name))
        return found

    def venv_cuda(self) -> list[int]:
        """CUDA majors whose runtime is in the venv."""
        found = set()
        for folder in self.nvidia_libraries("libcudart.so."):
            for name in os.listdir(os.path.join(folder, "lib")):
                major = diagnose.cudart_major(name)
                if major:
                    found.add(major)
        return sorted(found)

    def cuda_majors(self) -> list[int]:
        """CUDA majors whose runtime is in the venv, else on the host."""
        host = (diagnose.cudart_major(name) for name in self.loader.cache)
        return self.venv_cuda() or sorted({major for major in host if major})

    def lacking(self, names: Sequence[str]) -> list[str]:
        """Of the system libraries that wheels of these backends need, those that the loader does not find."""
        wanted = {soname for name in names for libraries in BACKENDS[name].system.values() for soname in libraries}
        nobody = _elf.Elf("/nobody.so")
        return sorted(soname for soname in wanted if self.loader.find(soname, nobody)[0] is None)

    def nccl_root(self) -> Optional[str]:
        """A prefix with NCCL in it: the venv's own, else the system's."""
        own = self.nvidia_libraries("libnccl.so")
        if own:
            return own[0]
        triplet = f"{self.loader.machine}-linux-gnu"
        for prefix, folder in (
            ("/usr", "/usr/lib"), ("/usr", "/usr/lib64"), ("/usr", "/usr/lib/" + triplet),
            ("/usr/local", "/usr/local/lib"), ("/usr/local/nccl", "/usr/local/nccl/lib"),
            ("/opt/nccl", "/opt/nccl/lib"),
        ):  # fmt: skip
            try:
                if any(name.startswith("libnccl.so") for name in os.listdir(self.context.path(folder))):
                    return prefix
            except OSError:
                continue
        return None

    def gpu_nodes(self) -> bool:
        """Whether this host has a device node of an NVIDIA GPU."""
        try:
            return any(re.match(r"^nvidia\d+$", name) for name in os.listdir(self.context.path("/dev")))
        except OSError:
            return False

    def capabilities(self) -> list[str]:
        """Compute capabilities of the GPUs, from the gpus subset if asked for, else from nvidia-smi; [] if none."""
        if self._capabilities is None:
            gpus = self.context.results.get("gpus")
            if isinstance(gpus, Mapping):
                found = [str(d.get("compute_capability") or "") for d in gpus.get("devices") or []]
            elif self.gpu_nodes():
                query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
                result = self.context.run(query, self.context.command_timeout)
                found = [line.strip() for line in result.stdout.splitlines()] if result.rc == 0 else []
            else:
                found = []
            self._capabilities = sorted({cap for cap in found if re.match(r"^\d+\.\d$", cap)})
        return self._capabilities

    def installed(self, dist: dists.Distribution, variant: str) -> diagnose.Installed:
        """A distribution with its files checked against RECORD."""
        if dist.path not in self._verified:
            check = dists.verify(dist, self.venv["path"])
            url = dists.direct_url(dist)
            pins = [dists.parse_requirement(line) for line in dist.metadata().requires]
            torch = [p[1] for p in pins if p and p[0] == "torch" and "==" in p[1] and "extra" not in p[2]]
            tags = dists.tags(dist)
            self._verified[dist.path] = diagnose.Installed(
                dist.name, dist.version, variant, dist.path, check["ok"], check["missing"], check["changed"],
                dists.tag_mismatch(tags, _venv.python_tuple(self.venv), self.venv.get("machine") or ""),
                dist.editable, dist.kind == "egg", url.get("commit"), torch[0] if torch else None, tags,
                [p[0] for p in pins if p and "extra" not in p[2]],
            )  # fmt: skip
        return self._verified[dist.path]

    def leftovers(self, names: Sequence[str]) -> list[str]:
        if self._leftovers is None:
            self._leftovers = dists.leftovers(self.paths.site)
        stems = {name.replace("-", "_")[1:] for name in names}
        return [
            path for path in self._leftovers
            if any(os.path.basename(path)[1:].lower().startswith(stem) for stem in stems)
        ]  # fmt: skip

    def backend(self, backend: Backend) -> dict[str, diagnose.Seen]:
        """The static evidence of every use of a backend."""
        known = dists.scan(self.paths.search, {*backend.variants, *backend.wrong})
        wrong, mine = [], []
        for dist in known:
            name = dists.canonical(dist.name)
            specifier = backend.wrong.get(name)
            if specifier is not None and (not specifier or dists.version_in(dist.version, specifier)):
                wrong.append(dist)
            elif name in backend.variants:
                mine.append(dist)
        installed = [self.installed(dist, _variant(backend, dist)) for dist in mine]
        top = dists.resolve(backend.module, self.paths.search, self.suffixes, self.paths.mapping)
        common = diagnose.Seen(
            top=top.kind, origin=top.origin, installed=installed,
            wrong=[self.installed(dist, "wrong") for dist in wrong],
            leftovers=self.leftovers([backend.module, *backend.variants]) if (mine or top.kind != "absent") else [],
            revision=self.request.revisions.get(backend.name),
        )  # fmt: skip
        self._outside(backend, top, mine, common)
        clobbers = backend.clobber_below is None or any(
            backend.clobber_below and dists.version_in(dist.version, "<" + backend.clobber_below) for dist in mine
        )
        if len(mine) > 1 and clobbers:
            shared = dists.shared_paths(mine)
            common.shared = sorted(os.path.relpath(path, self.venv["path"]) for path in shared)
            common.shared_owners = sorted({name for names in shared.values() for name in names})
        if top.kind in ("package", "module", "extension") and not known and not common.outside:
            common.foreign_owner = self._foreign_owner(backend.module)
        if backend.name == "nixl":
            common.other_ucx = self._other_ucx(mine)
        if top.kind == "package" and top.folder:
            common.baked = self._baked(top.folder)
        result = {}
        for name, use in backend.uses.items():
            seen = diagnose.Seen(**vars(common))
            seen.extensions = []
            seen.modules = {}
            if top.kind in ("package", "module", "extension"):
                for module in self.modules(use):
                    seen.modules[module] = dists.resolve(
                        module, self.paths.search, self.suffixes, self.paths.mapping
                    ).origin
                seen.extensions = [self._extension(built, backend, mine) for built in use.extensions]
                if use.gpu_code:
                    self._archs(seen, backend)
            elif backend.meta and mine:
                seen.extensions = []
            result[name] = seen
        return result

    def modules(self, use: Use) -> Mapping[str, Sequence[str]]:
        """What the installed SGLang imports for a use: read in its own files where its versions differ."""
        path = self.context.sglang.get("path")
        for file, text, modules in use.modules_by_file if path else ():
            if text in (_read(os.path.join(str(path), file)) or ""):
                return modules
        return use.modules

    def _outside(
        self, backend: Backend, top: dists.Spec, mine: Sequence[dists.Distribution], seen: diagnose.Seen
    ) -> None:
        if top.kind == "absent" or not top.origin:
            return
        inside = [os.path.realpath(self.venv["path"]) + os.sep]
        inside += [os.path.realpath(entry) + os.sep for entry in self.venv["site_packages"]]
        real = os.path.realpath(top.origin)
        if any(real.startswith(prefix) for prefix in inside) and top.entry not in self.paths.python_path:
            return
        if any(dist.editable for dist in mine) and top.entry not in self.paths.python_path:
            return
        seen.outside = top.origin
        behind = dists.resolve(backend.module, self.paths.site, self.suffixes)
        if behind.origin and behind.origin != top.origin:
            seen.hidden = behind.origin

    def _foreign_owner(self, module: str) -> Optional[str]:
        needle = f"\n{module}/__init__.py,"
        for site in self.paths.site:
            for dist in dists.scan([site]):
                if dist.kind == "wheel" and needle in "\n" + (dist.file("RECORD") or ""):
                    return f"{dist.name} {dist.version}"
        return None

    def _expand(self, name: str, mine: Sequence[dists.Distribution]) -> list[str]:
        torch = self.context.torch
        release = re.match(r"^\d+(?:\.\d+)*", str(torch.get("version") or ""))
        values = [name]
        if "{cuda}" in name:
            majors = [torch["cuda_major"]] if torch.get("cuda_major") else [13, 12]
            values = [name.replace("{cuda}", str(major)) for major in majors]
        if "{torch" in name:
            if not release:
                return []
            parts = release.group().split(".")
            values = [v.replace("{torch}", "_".join(parts)).replace("{torch_mm}", "".join(parts[:2])) for v in values]
        return values

    def _folder(self, package: str) -> Optional[str]:
        spec = dists.resolve(package, self.paths.search, self.suffixes, self.paths.mapping)
        return spec.folder

    def _extension(self, built: Built, backend: Backend, mine: Sequence[dists.Distribution]) -> diagnose.Extension:
        names = [name for pattern in built.names for name in self._expand(pattern, mine)]
        result = diagnose.Extension(
            tuple(names or built.names), family=built.family, torch_code=built.torch_code, optional=built.optional,
            absent_code=built.absent_code,
        )  # fmt: skip
        folders = []
        for name in names or [n for n in built.names if "{" not in n.split("/")[0]]:
            package, slash, stem = name.rpartition("/")
            if not slash:
                spec = dists.resolve(stem, self.paths.search, self.suffixes, self.paths.mapping)
            else:
                folder = self._folder(package)
                if folder is None:
                    continue
                folders.append(folder)
                spec = dists.resolve(stem, [folder], self.suffixes)
            if spec.kind == "extension" and spec.origin:
                result.path = spec.origin
                break
            result.foreign += [path for path in spec.foreign if path not in result.foreign]
        if result.path is None:
            if built.family:
                result.siblings = self._siblings(built.family, folders)
            return result
        self._load(result)
        return result

    def _siblings(self, family: str, folders: Sequence[str]) -> list[str]:
        found = set()
        for folder in folders:
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            for name in names:
                hit = re.match(family, name)
                if hit and name.endswith(".so"):
                    text = hit.group(1)
                    found.add(text.replace("_", ".") if "_" in text else f"{text[:1]}.{text[1:]}")
        return sorted(found)

    def _load(self, ext: diagnose.Extension) -> None:
        path = ext.path or ""
        elf = _elf.read(path)
        ext.problem, ext.machine = elf.problem, elf.machine
        if elf.problem or elf.machine != self.loader.machine:
            return
        closure = self.loader.closure(path)
        ext.missing, ext.wrong, ext.versions = closure.missing, closure.wrong, closure.versions
        own = self._package_files(path)
        ext.private = {soname: own[soname] for soname in closure.missing if soname in own}
        users = [elf, *(self.loader.elf(file) for name, file in closure.files.items() if self._ours(file))]
        needed = {soname for user in users for soname in user.needed}
        ext.cudart = sorted({m for m in (diagnose.cudart_major(soname) for soname in needed) if m})
        ext.needs_driver = "libcuda.so.1" in needed
        if not closure.missing and not closure.wrong:
            suspects = [s for s in elf.undefined if diagnose.classify_symbol(s) in _CHECKED_SYMBOLS]
            if suspects:
                files = [*closure.files.values(), path, *self._torch_libraries()]
                ext.undefined = sorted(set(suspects) - _elf.exported(files, suspects))

    def _torch_libraries(self) -> list[str]:
        found = []
        for folder in self.loader.preloaded:
            try:
                found += [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if ".so" in name]
            except OSError:
                continue
        return found

    def _ours(self, file: str) -> bool:
        """Whether a library lies with the wheels of the backends, and not with torch, nvidia or the system."""
        if any(file.startswith(folder + os.sep) for folder in self.loader.preloaded):
            return False
        return any(file.startswith(site + os.sep) for site in self.paths.search)

    def _package_files(self, path: str) -> dict[str, str]:
        """``{file name: path}`` of the libraries inside the package of ``path`` and its ``.libs`` folders."""
        folder = os.path.dirname(path)
        if folder in self.paths.search:
            return {}
        if folder not in self._private:
            found: dict[str, str] = {}
            for base, _folders, names in os.walk(folder):
                for name in names:
                    if ".so" in name:
                        found.setdefault(name, os.path.join(base, name))
                if len(found) > 2000:
                    break
            self._private[folder] = found
        return self._private[folder]

    def _archs(self, seen: diagnose.Seen, backend: Backend) -> None:
        files = [ext.path for ext in seen.extensions if ext.path]
        extra = []
        for path in files:
            extra += [f for f in self.loader.closure(path).files.values() if self._ours(f)]
        if not files:
            return
        seen.archs = _elf.gpu_archs([*files, *extra])
        if any(seen.archs.values()) and self.capabilities():
            seen.lacking_archs = _elf.missing_archs(seen.archs, self.capabilities())

    def _other_ucx(self, mine: Sequence[dists.Distribution]) -> Optional[str]:
        bundled = False
        for dist in mine:
            stem = dists.canonical(dist.name).replace("-", "_")
            try:
                names = os.listdir(os.path.join(dist.location, stem + ".libs"))
            except OSError:
                continue
            bundled = bundled or any(name.startswith("libucp") for name in names)
        if not bundled:
            return None
        for folder in self.loader.library_path:
            try:
                names = os.listdir(self.context.path(folder))
            except OSError:
                continue
            if any(name.startswith("libucp.so") for name in names):
                return folder
        return None

    def _baked(self, folder: str) -> dict[str, str]:
        """Paths that the builder's environment left in ``envs.py`` and that are of no use to the service's user."""
        text = _read(os.path.join(folder, "envs.py"), 65_536) or ""
        if "persistent_envs" not in text:
            return {}
        pairs = re.findall(r"['\"]([A-Z][A-Z0-9_]*)['\"]\s*(?:\]\s*=|:)\s*['\"](/[^'\"\n]*)['\"]", text)
        found = {}
        for name, value in pairs:
            if name in (self.context.environment or {}):
                continue
            if not self._usable(value, name.endswith("CACHE_DIR")):
                found[name] = value
        return found

    def _usable(self, path: str, written: bool) -> bool:
        if not os.path.isdir(path):
            return False
        uid = self.account.uid if self.account.uid is not None else os.geteuid()
        groups = self.account.groups or os.getgroups()
        return _venv.first_denied(path, uid, list(groups), 7 if written else 5) is None

    def tools(self, backend: Backend, seen: diagnose.Seen, facts: diagnose.Facts) -> dict[str, Any]:
        """The backend's programs that cannot load a library: ``{name: {state, code, message, found_at, remedy}}``."""
        result: dict[str, Any] = {}
        folder = os.path.dirname(seen.origin) if seen.origin and seen.top == "package" else None
        for name in backend.tools if folder else ():
            path = os.path.join(folder or "", name)
            if not os.path.isfile(path):
                continue
            ext = diagnose.Extension((name,), path=path)
            self._load(ext)
            finding = diagnose.program_finding(ext, facts)
            if finding is not None:
                result[name] = {
                    "state": finding.verdict, "code": finding.code, "message": finding.message,
                    "found_at": finding.data.get("found_at"),
                    "remedy": diagnose.remedy_for(finding, backend, "", seen, facts),
                }  # fmt: skip
        return result


# Whether these are defined can be told for certain from the files; of others the interpreter may be the owner.
_CHECKED_SYMBOLS = frozenset(
    ["torch_abi_mismatch", "nvshmem_mismatch", "nccl_mismatch", "incomplete_build", "device_link_missing"]
)


def _variant(backend: Backend, dist: dists.Distribution) -> str:
    """The variant of a distribution, by its name and version."""
    variant = backend.variants[dists.canonical(dist.name)]
    if variant == "meta" and backend.native_below and dists.version_in(dist.version, "<" + backend.native_below):
        return backend.native
    return variant


def service_pids(context: Context) -> list[int]:
    """The processes of the instance's unit, from its control group; no command is run."""
    for base in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"):
        text = context.read(f"{base}/system.slice/{context.unit}/cgroup.procs")
        if text and text.strip():
            return [int(line) for line in text.split() if line.isdigit()]
    service = context.results.get("service")
    pid = service.get("main_pid") if isinstance(service, Mapping) else None
    return [int(pid)] if pid else []


def loaded_libraries(context: Context, pids: Sequence[int]) -> tuple[list[str], int]:
    """(libraries of interest that the processes have loaded, number of processes that could not be looked into)."""
    found: list[str] = []
    denied = 0
    for pid in pids:
        text = context.read(f"/proc/{pid}/maps", 32 << 20)
        if text is None:
            denied += 1
            continue
        for line in text.splitlines():
            parts = line.split(None, 5)
            if len(parts) < 6 or ".so" not in parts[5] or parts[5] in found:
                continue
            if any(word in parts[5].rsplit("/", 1)[-1] for word in LIBRARIES):
                found.append(parts[5])
    return sorted(found), denied


def choose_account(venv: Mapping[str, Any], user: Optional[str], euid: int) -> tuple[Account, list[str]]:
    """Whom the import children run as, and notes on what that cannot show; never root for a venv that is not root's."""
    notes: list[str] = []
    ids = _venv.user_ids(user) if user else None
    if user and ids is None:
        notes.append(f"the user {user} does not exist yet: probed as the venv's owner, {venv.get('owner')}")
    if euid != 0:
        own = _venv.account_of(euid)
        if ids is not None and ids[0] != euid:
            notes.append(f"probed as {own.name}, not as {user}: run it with become to see what the service sees")
        return own, notes
    if ids is not None:
        return Account(ids[0], ids[1], ids[2], str(user), ids[3]), notes
    owner = venv.get("owner_uid")
    return _venv.account_of(int(owner) if owner is not None else 65_534), notes


def _whole_backends(names: Sequence[str], code: str, message: Optional[str]) -> dict[str, Any]:
    """Every use of every backend in the same state: what a venv that cannot be read leaves to say."""
    state, layer = CODES[code].state, CODES[code].layer
    remedy = {"kind": "none", "summary": CODES[code].mend,
              "steps": [{"action": "manual", "packages": [], "args": {"text": CODES[code].mend}}]}  # fmt: skip
    base = {"state": state, "code": code, "message": message, "level": "static", "layer": layer, "remedy": remedy,
            "evidence": {}}  # fmt: skip
    return {
        name: {**base, "distributions": [], "fatal_for_service": False,
               "uses": {use: dict(base) for use in BACKENDS[name].uses}}
        for name in names
    }  # fmt: skip


def _run_imports(*arguments: Any) -> dict[str, Outcome]:
    """Imported here, so that a host where there is nothing to import does not compile it."""
    from ansible_collections.gpufleet.sglang.plugins.module_utils._import_child import run_imports

    return run_imports(*arguments)


def gather_backends(
    context: Context, request: Request, paths: Paths, account: Account, os_family: str, notes: list[str],
    imports: Optional[Callable[..., dict[str, Outcome]]] = None,
) -> dict[str, Any]:  # fmt: skip
    """The ``backends`` part of the probe."""
    names = list(dict.fromkeys([*(request.backends or DEFAULT_BACKENDS), *request.wanted]))
    if context.venv["state"] != "ok":
        return _whole_backends(names, context.venv["code"], context.venv["message"])
    gatherer = Gatherer(context, paths, request, account)
    seen = {name: gatherer.backend(BACKENDS[name]) for name in names}
    groups, member = _groups(gatherer, seen)
    outcomes: dict[str, Outcome] = {}
    loaded: list[str] = []
    if groups and request.level != "static":
        pids = service_pids(context) if request.level == "auto" else []
        if pids:
            loaded, denied = loaded_libraries(context, pids)
            notes.append(f"{context.unit} is running: nothing was imported, its loaded libraries were read")
            if denied:
                notes.append(f"the libraries of {denied} of its processes could not be read")
        else:
            outcomes = (imports or _run_imports)(
                context.venv["python"], groups, account, context.environment, request.import_timeout,
                bool(context.torch.get("version")),
            )  # fmt: skip
    absent = any(s.top == "absent" for uses in seen.values() for s in uses.values())
    capabilities = gatherer.capabilities() if absent or groups else []
    toolkits = context.results.get("toolkits")
    facts = diagnose.Facts(
        context.venv, {**context.torch, "requires": _torch_requires(paths)}, context.sglang, os_family, capabilities,
        gatherer.gpu_nodes(), gatherer.cuda_majors(), gatherer.venv_cuda(),
        toolkits.get("best") if isinstance(toolkits, Mapping) else None, gatherer.nccl_root(),
        environment=context.environment, lacking=gatherer.lacking(names), nvidia=_nvidia(paths),
    )  # fmt: skip
    result = {}
    for name in names:
        backend = BACKENDS[name]
        guard = guard_of(backend, context.sglang)
        uses = {}
        fatal = False
        for use, evidence in seen[name].items():
            outcome = outcomes.get(member.get((name, use), ""))
            running = _loaded_outcome(evidence, loaded)
            decided = diagnose.decide_use(backend, use, evidence, facts, outcome or running)
            if running is not None:
                decided["level"] = "static"
                decided["evidence"]["loaded_by_service"] = running.libraries
            uses[use] = decided
            fatal = fatal or diagnose.fatal_for_service(outcome, guard)
        first = next(iter(seen[name].values()))
        decided = diagnose.decide_backend(
            backend, uses, request.wanted.get(name, ()), [*first.installed, *first.wrong], fatal
        )
        tools = gatherer.tools(backend, first, facts)
        if tools:
            decided["tools"] = tools
        result[name] = decided
    context.results["searched"] = {"python": paths.search, "libraries": gatherer.loader.searched()}
    return result


def _loaded_outcome(seen: diagnose.Seen, loaded: Sequence[str]) -> Optional[Outcome]:
    """What a running service proves: the use's extensions are loaded, so they can be."""
    files = {os.path.realpath(ext.path) for ext in seen.extensions if ext.path}
    mine = [path for path in loaded if path.replace(" (deleted)", "") in files]
    return Outcome("ok", libraries=mine) if mine and len(mine) >= len(files) else None


_NVIDIA = tuple(f"nvidia-{name}" for name in (
    "nccl-cu12", "nccl-cu13", "nvshmem-cu12", "nvshmem-cu13", "cuda-runtime-cu12", "cuda-runtime",
))  # fmt: skip


def _nvidia(paths: Paths) -> dict[str, str]:
    """The installed distributions of the libraries that torch and the backends share, ``{name: version}``."""
    found: dict[str, str] = {}
    for dist in dists.scan(paths.search, _NVIDIA):
        found.setdefault(dists.canonical(dist.name), dist.version)
    return found


def _torch_requires(paths: Paths) -> dict[str, str]:
    found: dict[str, str] = {}
    for dist in dists.scan(paths.search, ["torch"])[:1]:
        for line in dist.metadata().requires:
            parsed = dists.parse_requirement(line)
            if parsed and parsed[0].startswith("nvidia-"):
                found[parsed[0]] = parsed[1]
    return found


def _groups(
    gatherer: Gatherer, seen: Mapping[str, Mapping[str, diagnose.Seen]]
) -> tuple[list[Group], dict[tuple[str, str], str]]:
    """The groups to import, and which one each (backend, use) belongs to; none for what is surely not there."""
    groups: dict[str, Group] = {}
    member: dict[tuple[str, str], str] = {}
    for name, uses in seen.items():
        backend = BACKENDS[name]
        for use, evidence in uses.items():
            if evidence.top == "absent" or (evidence.top == "namespace" and not evidence.installed):
                continue
            modules = gatherer.modules(backend.uses[use])
            key = name + ":" + ",".join(modules)
            groups.setdefault(key, Group(key, backend.module, modules))
            member[(name, use)] = key
    return list(groups.values()), member


def probe(
    request: Request, context: Optional[Context] = None, imports: Optional[Callable[..., dict[str, Outcome]]] = None
) -> dict[str, Any]:
    """The whole ``probe`` (contracts.md). What is wrong with the host is in the result; only bad requests raise."""
    context = context or Context()
    context.environment = request.environment
    context.user, context.model_path, context.instance = request.user, request.model_path, request.instance
    context.command_timeout, context.import_timeout = request.command_timeout, request.import_timeout
    context.venv = _venv.read_venv(request.venv)
    account, notes = choose_account(context.venv, request.user, os.geteuid())
    if context.venv["state"] == "ok" and account.uid is not None:
        denied = _venv.unreadable_by(context.venv, account.uid, list(account.groups or []))
        if denied:
            context.venv.update(
                state="unreadable", code="venv_unreadable_by_user",
                message=f"The user {account.name or account.uid} cannot reach {denied}, which the venv needs.",
            )  # fmt: skip
    paths = search_paths(context.venv, request.environment, account.home)
    context.torch = dists.torch_version(paths.search)
    context.sglang = sglang_facts(paths.search, _venv.extension_suffixes(context.venv), paths.mapping)
    host = host_facts(context)
    result: dict[str, Any] = {
        "schema": 1, "venv": context.venv,
        "torch": {key: context.torch[key] for key in ("version", "cuda", "hip", "cuda_major")},
        "sglang": context.sglang, "host": host,
    }  # fmt: skip
    for name in request.subsets:
        if name == "backends":
            gathered = gather_backends(context, request, paths, account, host["os_family"], notes, imports)
            result["searched"] = context.results.pop("searched", None)
        else:
            gathered = _gather(name, context)
        context.results[name] = gathered
        result[name] = gathered
    result["account"] = account.name or (str(account.uid) if account.uid is not None else None)
    result["notes"] = notes
    return result


def _gather(name: str, context: Context) -> dict[str, Any]:
    """The result of a subset of its own util. Imported here, so that only what is asked for is read."""
    if name == "gpus":
        from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import gather
    elif name == "toolkits":
        from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkits import gather
    elif name == "fabric":
        from ansible_collections.gpufleet.sglang.plugins.module_utils._fabric import gather
    elif name == "server_args":
        from ansible_collections.gpufleet.sglang.plugins.module_utils._server_args import gather
    elif name == "model":
        from ansible_collections.gpufleet.sglang.plugins.module_utils._model import gather
    else:
        from ansible_collections.gpufleet.sglang.plugins.module_utils._service_state import gather
    return gather(context)
