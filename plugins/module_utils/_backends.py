# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: the table of communication backends. A new backend is one entry here, plus its tests.

In names of extensions, ``{cuda}`` is the CUDA major of the venv's torch (``13``), ``{torch}`` its version
(``2_13_0``) and ``{torch_mm}`` its major and minor (``213``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional


class Built(NamedTuple):
    """An extension that has to be there: the first of ``names`` that exists is the one that counts.

    ``family`` is a pattern with one group for the torch version of siblings: if only other versions are there, the
    cause is ``torch_code``. ``optional``: no sibling at all is no fault (older or later layouts do without).
    ``absent_code`` is the cause when there is none of any kind.
    """

    names: tuple[str, ...]
    family: Optional[str] = None
    torch_code: Optional[str] = None
    optional: bool = False
    absent_code: str = "extension_missing"


class Use(NamedTuple):
    """What a backend is wanted for.

    ``modules``: ``{module: attributes}`` that SGLang imports; ``extensions``: what must be there and load.
    ``gpu_code``: the files carry kernels, so that the GPUs' architecture matters. ``cuda``: useless without CUDA.
    ``modules_by_file``: ``(file of the installed SGLang, text in it, modules)`` where SGLang's versions differ.
    """

    modules: Mapping[str, tuple[str, ...]]
    extensions: tuple[Built, ...] = ()
    gpu_code: bool = False
    cuda: bool = False
    modules_by_file: tuple[tuple[str, str, Mapping[str, tuple[str, ...]]], ...] = ()


class Incompatible(NamedTuple):
    """Versions that import and do not work with an SGLang; ``good`` is the specifier to install instead."""

    uses: tuple[str, ...]
    versions: str
    sglang: str
    why: str
    good: str
    source: str


class Backend(NamedTuple):
    """One backend. ``variants``: ``{distribution: variant}``, ``install``: ``{variant: requirements}``.

    A variant is ``cu12``, ``cu13``, ``non-cuda``, a vendor's name, or ``any``. ``meta`` is the distribution that
    provides the module for the variants (nixl). ``pins``: ``{distribution: version}`` for where SGLang requires none.
    ``clobber_below``: below this version two variants own the same files; None means that they always do, ``""`` never.
    ``guard``: the file of SGLang that imports it unconditionally. ``archs``: cubins of the published wheel.
    ``system``: by variant, libraries of the operating system that its wheel needs.
    ``flavours``: distributions for another network, ``{distribution: flavour}``: a replacement stays in its flavour.
    ``native_below``: below this version the meta distribution held the library itself, in the variant ``native``.
    ``needs``: the oldest version of a library's distribution that its published builds work with.
    ``torch_builds``: ``{distribution: {version: torch releases that it has extensions for}}``, newest first.
    ``torch_of``: the one torch that each version of the published wheel is for. ``min_capability``: below it there is
    nothing to build either. ``no_deps``: its dependencies must not be resolved.
    """

    name: str
    module: str
    uses: Mapping[str, Use]
    variants: Mapping[str, str]
    install: Mapping[str, tuple[str, ...]]
    pins: Mapping[str, str] = {}
    meta: Optional[str] = None
    wrong: Mapping[str, str] = {}
    clobber_below: Optional[str] = ""
    incompatible: tuple[Incompatible, ...] = ()
    environment: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    guard: Optional[str] = None
    guard_versions: str = ""
    archs: tuple[str, ...] = ()
    system: Mapping[str, tuple[str, ...]] = {}
    flavours: Mapping[str, str] = {}
    native_below: str = ""
    native: str = ""
    torch_builds: Mapping[str, Mapping[str, tuple[str, ...]]] = {}
    needs: Mapping[str, str] = {}
    min_capability: Optional[str] = None
    torch_of: Mapping[str, str] = {}
    no_deps: bool = False
    buildable: bool = False
    default: bool = False


# Read in the wheels 0.3.13.post1; those with CUDA reach for the NIC themselves.
_MOONCAKE_SYSTEM = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
_MOONCAKE_CUDA = (*_MOONCAKE_SYSTEM, "libmlx5.so.1")
_MOONCAKE_PG = Built(
    ("mooncake/pg_{torch}",),
    family=r"^(?:pg|ep)_(\d+(?:_\d+)*)\.",
    torch_code="mooncake_pg_not_built_for_torch",
    optional=True,
)
_NIXL_EP = Built(
    ("nixl_ep_cu{cuda}/nixl_ep_cpp_torch{torch_mm}", "nixl_ep_cu{cuda}/nixl_ep_cpp", "nixl_ep/nixl_ep_cpp"),
    family=r"^nixl_ep_cpp_torch(\d+)\.",
    torch_code="nixl_ep_not_built_for_torch",
)

BACKENDS: dict[str, Backend] = {
    "deep_ep": Backend(
        name="deep_ep",
        module="deep_ep",
        default=True,
        uses={
            "a2a": Use(
                {"deep_ep": ("Buffer", "Config")},
                # The branch hybrid-ep has a second extension; the others do without.
                (Built(("deep_ep/_C", "deep_ep_cpp")), Built(("hybrid_ep_cpp",), optional=True)),
                gpu_code=True,
                cuda=True,
            )
        },
        variants={"sgl-deep-ep": "any", "deep-ep": "any", "tokenspeed-deepep": "any"},
        clobber_below=None,
        install={"cu13": ("sgl-deep-ep",), "any": ()},
        pins={"sgl-deep-ep": "0.1.2.post1"},
        # An sdist without headers: nothing of it can be imported. A build of one's own has the same name, and + in it.
        wrong={"deep-ep": "==1.0.0"},
        guard="srt/layers/moe/token_dispatcher/deepep.py",
        # Read in the wheels 0.4.9 to 0.5.23: up to 0.5.21 the guard takes ImportError only, later any Exception.
        guard_versions="<=0.5.21",
        environment=("CUDA_HOME", "EP_NCCL_ROOT_DIR", "EP_JIT_CACHE_DIR", "EP_SUPPRESS_NCCL_CHECK", "HOME", "PATH"),
        archs=("9.0", "10.0", "10.3"),
        # The library may import from 8.0 on; SGLang's use of it, and any build worth making, begin at 9.0.
        min_capability="9.0",
        torch_of={"0.1.2.post1": "2.14.1", "0.1.2": "2.13.0"},
        # DeepEP 2; torch 2.11 and older pin an NCCL that lacks its device functions (deepseek-ai/DeepEP#710).
        needs={"nvidia-nccl-cu12": "2.30.4", "nvidia-nccl-cu13": "2.30.4"},
        no_deps=True,
        buildable=True,
    ),
    "mooncake": Backend(
        name="mooncake",
        module="mooncake",
        default=True,
        uses={
            "kv_transfer": Use({"mooncake.engine": ("TransferEngine",)}, (Built(("mooncake/engine",)),)),
            "a2a": Use(
                {"mooncake.mooncake_ep_buffer": ("Buffer",), "mooncake.ep": ()},
                (
                    Built(
                        ("mooncake/_ep", "mooncake/ep_{torch}"),
                        family=r"^(?:pg|ep)_(\d+(?:_\d+)*)\.",
                        torch_code="mooncake_ep_not_built_for_torch",
                    ),
                    _MOONCAKE_PG,
                ),
                gpu_code=True,
                cuda=True,
            ),
            "elastic_ep": Use(
                {"mooncake.pg": ()},
                (_MOONCAKE_PG,),
                gpu_code=True,
                cuda=True,
                modules_by_file=(
                    ("srt/distributed/parallel_state.py", "mooncake.pg", {"mooncake.pg": ()}),
                    ("srt/distributed/parallel_state.py", "mooncake.ep", {"mooncake.ep": ()}),
                ),
            ),
        },
        variants={
            "mooncake-transfer-engine": "cu12",
            "mooncake-transfer-engine-cuda13": "cu13",
            "mooncake-transfer-engine-non-cuda": "non-cuda",
            "mooncake-transfer-engine-efa": "cu12",
            "mooncake-transfer-engine-efa-cuda13": "cu13",
            "mooncake-transfer-engine-efa-non-cuda": "non-cuda",
            "mooncake-transfer-engine-musa": "musa",
            "mooncake-transfer-engine-rocm": "rocm",
            "mooncake-transfer-engine-npu": "npu",
        },
        install={
            "cu12": ("mooncake-transfer-engine",),
            "cu13": ("mooncake-transfer-engine-cuda13",),
            "non-cuda": ("mooncake-transfer-engine-non-cuda",),
            "rocm": ("mooncake-transfer-engine-rocm",),
        },
        pins={
            "mooncake-transfer-engine": "0.3.13.post1",
            "mooncake-transfer-engine-cuda13": "0.3.13.post1",
            "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
            "mooncake-transfer-engine-rocm": "0.3.13.post1",
        },
        wrong={"mooncake": ""},
        flavours={
            "mooncake-transfer-engine-efa": "efa",
            "mooncake-transfer-engine-efa-cuda13": "efa",
            "mooncake-transfer-engine-efa-non-cuda": "efa",
        },
        system={"cu12": _MOONCAKE_CUDA, "cu13": _MOONCAKE_CUDA, "non-cuda": _MOONCAKE_SYSTEM},
        clobber_below=None,
        incompatible=(
            Incompatible(
                ("a2a", "elastic_ep"),
                ">=0.3.14",
                "<0.5.16",
                "mooncake.ep has no set_host_ip, which this SGLang calls, and active_ranks is None",
                ">=0.3.10.post2,<=0.3.13.post1",
                "run on two H200 with SGLang 0.5.15.post1",
            ),
        ),
        tools=("mooncake_master", "mooncake_client"),
    ),
    "nixl": Backend(
        name="nixl",
        module="nixl",
        default=True,
        uses={
            "kv_transfer": Use(
                {"nixl._api": ("nixl_agent", "nixl_agent_config")},
                (Built(("nixl_cu{cuda}/_bindings", "nixl/_bindings")),),
            ),
            "a2a": Use({"nixl_ep": ("Buffer",)}, (_NIXL_EP,), gpu_code=True, cuda=True),
            "elastic_ep": Use({"nixl_ep": ("Buffer",)}, (_NIXL_EP,), gpu_code=True, cuda=True),
        },
        variants={"nixl-cu12": "cu12", "nixl-cu13": "cu13", "nixl-rocm": "rocm", "nixl": "meta"},
        install={
            "cu12": ("nixl", "nixl-cu12"),
            "cu13": ("nixl", "nixl-cu13"),
            "non-cuda": ("nixl", "nixl-cu12"),
        },
        pins={"nixl": "1.5.1", "nixl-cu12": "1.5.1", "nixl-cu13": "1.5.1"},
        meta="nixl",
        # The meta package requires every variant: resolving it would bring both.
        no_deps=True,
        clobber_below="1.3.0",
        # Read in its tags: up to 0.7.0 the distribution nixl is the library, built with CUDA 12; 0.7.1 made it a meta
        # package over nixl-cu12 and nixl-cu13.
        native_below="0.7.1",
        native="cu12",
        # Seen in the wheels: the extensions of nixl_ep that each brings.
        torch_builds={
            "nixl-cu13": {"1.5.1": ("2.12", "2.13", "2.14"), "1.4.1": ("2.11",), "1.3.1": ("2.11",)},
            "nixl-cu12": {"1.5.1": ("2.11", "2.12", "2.13")},
        },
        incompatible=(
            Incompatible(
                ("a2a", "elastic_ep"),
                ">=1.4.1",
                "<0.5.16",
                "nixl_ep takes another type of topk_idx than this SGLang passes",
                "==1.3.1",
                "run on two H200 with SGLang 0.5.15.post1",
            ),
        ),
        environment=("LD_LIBRARY_PATH", "NIXL_PLUGIN_DIR", "UCX_TLS"),
    ),
    "mori": Backend(
        name="mori",
        module="mori",
        uses={
            "a2a": Use({"mori": ()}, gpu_code=False),
            "kv_transfer": Use({"mori.io": ("IOEngine",)}),
        },
        variants={"amd-mori": "any", "amd-mori-nightly": "any"},
        clobber_below=None,
        install={"any": ("amd-mori",)},
        pins={"amd-mori": "1.2.4"},
    ),
    "flashinfer": Backend(
        name="flashinfer",
        module="flashinfer",
        uses={"a2a": Use({"flashinfer.comm": ("MoeAlltoAll",)}, cuda=True)},
        variants={"flashinfer-python": "any"},
        install={"any": ("flashinfer-python",)},
        wrong={"flashinfer-python-paddle": ""},
    ),
}

DEFAULT_BACKENDS = tuple(name for name, backend in BACKENDS.items() if backend.default)

# Library of the operating system -> (package of the Debian family, package of the Red Hat family). Debian names most
# packages by the library's ABI: ``{abi}`` is what follows ``.so.`` in the name that is missing.
OS_PACKAGES: dict[str, tuple[str, str]] = {
    "libibverbs.so": ("libibverbs1", "libibverbs"),
    "libmlx5.so": ("ibverbs-providers", "libibverbs"),
    "libmlx4.so": ("ibverbs-providers", "libibverbs"),
    "libefa.so": ("ibverbs-providers", "libibverbs"),
    "librdmacm.so": ("librdmacm1", "librdmacm"),
    "libibumad.so": ("libibumad3", "libibumad"),
    "libnuma.so": ("libnuma1", "numactl-libs"),
    "libcurl.so": ("libcurl4", "libcurl"),
    "libnl-3.so": ("libnl-3-200", "libnl3"),
    "libnl-route-3.so": ("libnl-route-3-200", "libnl3"),
    "libstdc++.so": ("libstdc++6", "libstdc++"),
    "libgomp.so": ("libgomp1", "libgomp"),
    "libssl.so": ("libssl{abi}", "openssl-libs"),
    "libssl.so.1": ("libssl{abi}", "compat-openssl11"),
    "libcrypto.so.1": ("libssl{abi}", "compat-openssl11"),
    "libcrypto.so": ("libssl{abi}", "openssl-libs"),
    "libhwloc.so": ("libhwloc{abi}", "hwloc-libs"),
    "libpci.so": ("libpci{abi}", "pciutils-libs"),
    "libz.so": ("zlib1g", "zlib"),
    "libzmq.so": ("libzmq{abi}", "zeromq"),
    "libunwind.so": ("libunwind{abi}", "libunwind"),
    "libatomic.so": ("libatomic{abi}", "libatomic"),
    "libgflags.so": ("libgflags{abi}", "gflags"),
    "libglog.so": ("libgoogle-glog0v6", "glog"),
    "libglog.so.0": ("libgoogle-glog0v5", "glog"),
    "libjsoncpp.so": ("libjsoncpp{abi}", "jsoncpp"),
    "libyaml-cpp.so": ("libyaml-cpp{abi}", "yaml-cpp"),
    "libgrpc++.so": ("libgrpc++{abi}", "grpc-cpp"),
    "libprotobuf.so": ("libprotobuf{abi}", "protobuf"),
    "libxxhash.so": ("libxxhash{abi}", "xxhash-libs"),
    "libhiredis.so": ("libhiredis{abi}", "hiredis"),
    "libboost_thread.so": ("libboost-thread{abi}", "boost-thread"),
    "libboost_filesystem.so": ("libboost-filesystem{abi}", "boost-filesystem"),
    "libboost_system.so": ("libboost-system{abi}", "boost-system"),
    "liburing.so": ("liburing{abi}", "liburing"),
    "libaio.so": ("libaio{abi}", "libaio"),
    "libfabric.so": ("libfabric{abi}", "libfabric"),
    "libucp.so": ("libucx{abi}", "ucx"),
    "libuct.so": ("libucx{abi}", "ucx"),
    "libucs.so": ("libucx{abi}", "ucx"),
    "libmpi.so": ("libopenmpi3", "openmpi"),
}

# Runtime of another vendor's accelerators -> the variant that needs it.
VENDOR_LIBRARIES: dict[str, str] = {
    "libamdhip64.so": "rocm", "libhsa-runtime64.so": "rocm", "librccl.so": "rocm", "libhipblas.so": "rocm",
    "libmusart.so": "musa", "libmusa.so": "musa", "libmccl.so": "musa",
    "libascendcl.so": "npu", "libhccl.so": "npu", "libruntime.so": "npu", "ascend_transport.so": "npu",
    "libze_loader.so": "xpu",
}  # fmt: skip

# The two families name some packages by the library's ABI: the release decides, so a name is a good guess only.
DRIVER_LIBRARIES = ("libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so", "libnvcuvid.so")

# Library that a Python wheel provides -> (distribution for CUDA 12, for CUDA 13).
WHEEL_LIBRARIES: dict[str, tuple[str, str]] = {
    "libnccl.so": ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    "libnvshmem_host.so": ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"),
    "libcublas.so": ("nvidia-cublas-cu12", "nvidia-cublas"),
    "libcublasLt.so": ("nvidia-cublas-cu12", "nvidia-cublas"),
    "libnvrtc.so": ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"),
    "libcudnn.so": ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    "libcufile.so": ("nvidia-cufile-cu12", "nvidia-cufile"),
    "libcusparse.so": ("nvidia-cusparse-cu12", "nvidia-cusparse"),
    "libcusparseLt.so": ("nvidia-cusparselt-cu12", "nvidia-cusparselt-cu13"),
    "libcusolver.so": ("nvidia-cusolver-cu12", "nvidia-cusolver"),
    "libcufft.so": ("nvidia-cufft-cu12", "nvidia-cufft"),
    "libcurand.so": ("nvidia-curand-cu12", "nvidia-curand"),
    "libcupti.so": ("nvidia-cuda-cupti-cu12", "nvidia-cuda-cupti"),
    "libnvJitLink.so": ("nvidia-nvjitlink-cu12", "nvidia-nvjitlink"),
}

# Module of Python -> the distribution that provides it: the two names are alike by custom only.
MODULE_DISTRIBUTIONS: dict[str, str] = {
    "aiohttp": "aiohttp", "cv2": "opencv-python-headless", "einops": "einops", "filelock": "filelock",
    "jinja2": "jinja2", "msgpack": "msgpack", "msgspec": "msgspec", "numpy": "numpy", "packaging": "packaging",
    "PIL": "pillow", "psutil": "psutil", "pydantic": "pydantic", "pynvml": "nvidia-ml-py", "requests": "requests",
    "sympy": "sympy", "tqdm": "tqdm", "typing_extensions": "typing-extensions", "yaml": "pyyaml", "zmq": "pyzmq",
}  # fmt: skip

TORCH_LIBRARIES = (
    "libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10_cuda.so", "libtorch_cuda.so",
)  # fmt: skip


def distributions_of(names: tuple[str, ...] = tuple(BACKENDS)) -> dict[str, str]:
    """``{canonical distribution: backend}`` of everything that the table knows, wrong names too."""
    found: dict[str, str] = {}
    for name in names:
        backend = BACKENDS[name]
        for distribution in (*backend.variants, *backend.wrong):
            found[distribution] = name
    return found
