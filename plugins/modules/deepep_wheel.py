#!/usr/bin/python
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: deepep_wheel
short_description: Build a DeepEP wheel for a target venv once, and prove it
version_added: 0.1.0
description:
  - Compiles DeepEP (v1, v2 or hybrid-ep; recognised from its source) against the torch of a target venv and the CUDA
    toolkit that matches it, and keeps the wheel in a cache on the host, named by its fingerprint. When the cache
    holds it already, nothing is compiled.
  - All that is missing is told at once, before any compiler runs.
  - The build is detached from the connection. A dropped connection or a killed controller does not end it; running the
    module again attaches to it. A build that was ended keeps its finished objects.
  - A wheel enters the cache only after its content was imported by the target venv's interpreter, outside of the
    source tree. The venv itself is never changed; install the wheel with M(gpufleet.sglang.backend_packages) and
    RV(remedy).
  - This is an action plugin with a module behind it; while it waits, it prints how far the build has come.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  venv:
    description: Path of the target venv, or of its interpreter.
    type: path
    required: true
  state:
    description:
      - V(present) makes sure that the cache holds a proven wheel.
      - V(fetched) only brings a git source into the host's cache, so that V(observed) can tell the final fingerprint.
      - V(observed) only says what V(present) would do, and never fails because of what it finds.
      - V(cancelled) ends a running build and everything that it started.
      - V(smoke) runs a dispatch and a combine over the local GPUs with the DeepEP that is installed in the venv (or
        with O(smoke_wheel)), checks the result, and measures both it and the all-to-all of torch.distributed.
    type: str
    choices: [present, fetched, observed, cancelled, smoke]
    default: present
  source_path:
    description: A folder or a tar archive on the host with DeepEP's source. Submodules must be in it.
    type: path
  source_url:
    description:
      - Git URL of the source, when O(source_path) is not given. The default is DeepEP's own repository.
      - The venv's owner must be able to read it; passwords in the URL are refused.
    type: str
  revision:
    description:
      - Commit, tag or branch for a git source.
      - The default is the revision that fits the venv's SGLang (C(9af0e0d), DeepEP v1.2.1, before SGLang 0.5.19;
        C(dd758ca), DeepEP 2.1.0, from then on).
    type: str
  gpu_archs:
    description:
      - GPU architectures to compile for (V(9.0), V(sm_90)). The default is those of the GPUs that the host has.
      - Needed on a host without GPUs.
    type: list
    elements: str
  allow_unproven_archs:
    description: Also build for architectures from sm_90 on that upstream does not claim to support.
    type: bool
    default: false
  toolkit:
    description: The CUDA toolkit to use. The default is the installed one that matches torch best.
    type: path
  compiler:
    description: The C++ compiler, for nvcc too. The default is C(g++).
    type: path
  nvshmem_dir:
    description: Folder of NVSHMEM, when the venv holds none.
    type: path
  nccl_dir:
    description: Folder of NCCL (v2), when the venv holds none.
    type: path
  extra_include_dirs:
    description: More folders with headers, such as those of rdma-core.
    type: list
    elements: path
    default: []
  wheelhouse:
    description: Folder on the host with wheels of setuptools and ninja; when set, no package index is asked for
      build tools.
    type: path
  multinode:
    description: For hybrid-ep, build the transport over several nodes, with V(doca) or V(nixl).
    type: str
    choices: [doca, nixl]
  num_topk_idx_bits:
    description: For v2, the width of expert indices.
    type: int
    choices: [32, 64]
  environment:
    description: More variables for the build. They are part of the fingerprint.
    type: dict
    default: {}
  service_environment:
    description: The service's variables, with which the import is proven.
    type: dict
    default: {}
  max_jobs:
    description: Upper limit for parallel compiler jobs. The default follows from CPUs, available memory and disk space.
    type: int
  time_limit:
    description: Seconds after which the build is ended, with everything that it started.
    type: int
    default: 7200
  proof_timeout:
    description: Seconds for the import that proves the wheel, and for O(state=smoke).
    type: int
    default: 300
  force:
    description: Build even though the cache holds the wheel.
    type: bool
    default: false
  compile:
    description:
      - With V(false) nothing is built; a wheel that is not in the cache is a failure.
      - For hosts that wait for the wheel of another one.
    type: bool
    default: true
  smoke_wheel:
    description: For O(state=smoke), a wheel on the host to try instead of what is installed.
    type: path
  smoke_gpus:
    description: For O(state=smoke), how many GPUs to use. The default is all.
    type: int
  smoke_tokens:
    description: For O(state=smoke), tokens of each rank.
    type: int
    default: 4096
  state_dir:
    description: Where sources, builds and wheels are kept.
    type: path
    default: /var/lib/gpufleet-sglang
  slice_seconds:
    description: How long one module call waits at most. Set by the action plugin.
    type: float
    default: 30
  carry:
    description: What the action plugin hands from one call to the next.
    type: dict
    default: {}
author:
  - gpufleet.sglang contributors (@gpufleet)
"""

EXAMPLES = r"""
- name: Build DeepEP for the venv from an unpacked source
  gpufleet.sglang.deepep_wheel:
    venv: /opt/sglang/venv
    source_path: /srv/src/DeepEP
  become: true
  register: deepep

- name: Install it
  gpufleet.sglang.backend_packages:
    venv: /opt/sglang/venv
    remedies: ["{{ deepep.remedy }}"]
  become: true

- name: Would DeepEP help on this host?
  gpufleet.sglang.deepep_wheel:
    venv: /opt/sglang/venv
    state: smoke
  become: true
"""

RETURN = r"""
build_state:
  description:
    - C(present), C(built), C(fetched), C(would_build), C(would_fetch), C(building), C(blocked), C(failed),
      C(cancelled), C(idle), or C(smoke).
  returned: always
  type: str
  sample: built
fingerprint:
  description: Names the wheel; hosts with the same one share it. Preliminary while a git source is not fetched yet.
  returned: when the venv could be read
  type: str
  sample: 1f0c2b7d9a3e4c55
parts:
  description: What the fingerprint is made from.
  returned: when the venv could be read
  type: dict
  sample: {generation: v1, revision: 9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee, torch: 2.11.0+cu130, archs: ["9.0"]}
cached:
  description: Whether the cache on the host holds the wheel.
  returned: when the venv could be read
  type: bool
wheel:
  description: Path of the wheel on the host.
  returned: when the cache holds it
  type: str
manifest:
  description: What is known of the wheel; also in C(manifest.json) beside it.
  returned: when the cache holds it
  type: dict
remedy:
  description: A remedy for M(gpufleet.sglang.backend_packages) that installs the wheel.
  returned: when the cache holds it
  type: dict
preflight:
  description: C(problems) (C(code), C(message), C(mend), C(packages)), C(warnings) and C(decisions).
  returned: when the venv could be read
  type: dict
cause:
  description: Why it failed, C(code), C(message), C(mend), C(text) (the first real error), C(log).
  returned: on failure
  type: dict
smoke:
  description: Correctness and GB/s of the backend and of torch.distributed.
  returned: O(state=smoke)
  type: dict
  sample: {state: ok, ranks: 2, correct: true, dispatch_gbps: 330.1, combine_gbps: 331.0, baseline_gbps: 210.4}
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils import _deepep_steps

ARGUMENTS = {
    "venv": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["present", "fetched", "observed", "cancelled", "smoke"], "default": "present"},
    "source_path": {"type": "path"},
    "source_url": {"type": "str"},
    "revision": {"type": "str"},
    "gpu_archs": {"type": "list", "elements": "str"},
    "allow_unproven_archs": {"type": "bool", "default": False},
    "toolkit": {"type": "path"},
    "compiler": {"type": "path"},
    "nvshmem_dir": {"type": "path"},
    "nccl_dir": {"type": "path"},
    "extra_include_dirs": {"type": "list", "elements": "path", "default": []},
    "wheelhouse": {"type": "path"},
    "multinode": {"type": "str", "choices": ["doca", "nixl"]},
    "num_topk_idx_bits": {"type": "int", "choices": [32, 64]},
    "environment": {"type": "dict", "default": {}},
    "service_environment": {"type": "dict", "default": {}},
    "max_jobs": {"type": "int"},
    "time_limit": {"type": "int", "default": 7200},
    "proof_timeout": {"type": "int", "default": 300},
    "force": {"type": "bool", "default": False},
    "compile": {"type": "bool", "default": True},
    "smoke_wheel": {"type": "path"},
    "smoke_gpus": {"type": "int"},
    "smoke_tokens": {"type": "int", "default": 4096, "no_log": False},
    "state_dir": {"type": "path", "default": "/var/lib/gpufleet-sglang"},
    "slice_seconds": {"type": "float", "default": 30.0},
    "carry": {"type": "dict", "default": {}},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec=ARGUMENTS,
        supports_check_mode=True,
        mutually_exclusive=[("source_path", "source_url"), ("source_path", "revision")],
    )
    # The venv's owner has to reach its build, and fetch reads the wheel without become: also where root's umask is 077.
    os.umask(0o022)
    result = _deepep_steps.step(module.params, module.check_mode)
    if result.pop("failed", False):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
