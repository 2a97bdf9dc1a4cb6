#!/usr/bin/python
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: probe_info
short_description: Say what a GPU host has for SGLang, and what is wrong with it
version_added: 1.0.0
description:
  - Reads a target venv and its host in one call. For the communication libraries C(deep_ep), C(mooncake) and C(nixl) it
    says, for each use, whether it works, the exact cause if not, who owns the fault, and the smallest mend.
  - Files are read first (metadata, RECORD, ELF headers); imports confirm them in child processes, as the user, with
    the environment and search path of the service, from an empty directory.
  - Whatever a library does at import (raise, abort, exit, hang, print, fork) is a result; the module fails only on
    options that it cannot use.
  - While the service is running nothing is imported, since that could take its GPUs' memory; the libraries that its
    processes have loaded are read instead.
notes:
  - Run it as root (C(become)). Imports then run as O(probe_user), or as the owner of the venv where that user does not
    exist yet. A venv that is not root's is never run as root.
  - Without root it works with what it may read, and RV(probe.notes) says what that leaves out.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
  - gpufleet.sglang.attributes.info
options:
  venv:
    description: The target venv, or the interpreter inside it.
    type: path
    required: true
  gather_subset:
    description:
      - What to gather. V(all) is everything; V(!name) leaves one out.
      - One of V(backends), V(server_args), V(gpus), V(toolkits), V(fabric), V(model), V(service).
    type: list
    elements: str
    default: [backends, server_args]
  gather_level:
    description:
      - V(static) reads files and imports nothing.
      - V(import) imports even while the service is running.
      - V(auto) imports unless the service is running.
    type: str
    choices: [auto, static, import]
    default: auto
  probe_user:
    description: The user that the service runs as.
    type: str
  probe_environment:
    description:
      - The variables of the service's environment, all of them; they are added to what systemd gives any service.
      - When it is left out, no service is known and the interpreter is isolated (C(-I)).
    type: dict
  import_timeout:
    description: Seconds given to the import of torch, and again to those of the backends together.
    type: float
    default: 120
  command_timeout:
    description: Seconds given to each command, such as C(nvidia-smi).
    type: float
    default: 20
  backends:
    description:
      - The backends to look at, by default V(deep_ep), V(mooncake) and V(nixl). V(mori) and V(flashinfer) are known
        too.
      - Those named in O(wanted) are always looked at.
    type: list
    elements: str
  wanted:
    description:
      - "What each backend is wanted for: C({mooncake: [kv_transfer]}). The worst of these is the backend's state."
    type: dict
    default: {}
  revisions:
    description: "The source revision that a self-built backend has to be of: C({deep_ep: 9af0e0d})."
    type: dict
    default: {}
  model_path:
    description: The model whose config.json the V(model) subset reads.
    type: str
  instance:
    description: The instance, which names the unit C(sglang-<instance>.service).
    type: str
    default: default
author:
  - the gpufleet.sglang contributors (@gpufleet)
"""

EXAMPLES = r"""
- name: Look at the backends as the service will see them
  gpufleet.sglang.probe_info:
    venv: /opt/sglang/venv
    probe_user: sglang
    probe_environment:
      CUDA_HOME: /usr/local/cuda
    wanted:
      mooncake: [kv_transfer]
  become: true
  register: host

- name: Everything about the host, and nothing imported
  gpufleet.sglang.probe_info:
    venv: /opt/sglang/venv
    gather_subset: [all]
    gather_level: static
"""

RETURN = r"""
probe:
  description: What was found. A subset that was not asked for is missing.
  returned: always
  type: dict
  contains:
    venv:
      description: The venv; C(state) is C(ok), C(venv_absent), C(not_a_venv) or C(unreadable).
      type: dict
      sample: {path: /opt/sglang/venv, state: ok, python_version: 3.12.3, machine: x86_64, owner: sglang}
    torch:
      description: torch's version and CUDA, without importing it; all null when it is absent.
      type: dict
      sample: {version: 2.14.1+cu130, cuda: "13.0", hip: null, cuda_major: 13}
    sglang:
      description: SGLang's version, place, and what it requires of the distributions that matter here.
      type: dict
    host:
      description: Name, machine, family of the operating system, memory, processors and DeepEP wheels (fingerprints).
      type: dict
    backends:
      description:
        - By name, the C(state), C(code), C(message), C(level) of evidence, C(layer) that owns the fault, C(remedy),
          C(distributions), C(fatal_for_service) and C(uses) with the same for each use.
      type: dict
      sample:
        mooncake:
          state: variant_mismatch
          code: cuda_major_mismatch
          level: import
          layer: wheel
          remedy:
            kind: replace
            steps:
              - {action: pip_uninstall, packages: [mooncake-transfer-engine], args: {}}
              - action: pip_install
                packages: [mooncake-transfer-engine-cuda13==0.3.13.post1]
                args: {flags: [--force-reinstall, --no-deps]}
    searched:
      description: The folders in which Python and the loader looked, in order.
      type: dict
    account:
      description: Whom the imports ran as.
      type: str
    notes:
      description: What the probe could not see, and why.
      type: list
      elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils import _probe


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "venv": {"type": "path", "required": True},
            "gather_subset": {"type": "list", "elements": "str", "default": ["backends", "server_args"]},
            "gather_level": {"type": "str", "choices": ["auto", "static", "import"], "default": "auto"},
            "probe_user": {"type": "str"},
            "probe_environment": {"type": "dict"},
            "import_timeout": {"type": "float", "default": 120},
            "command_timeout": {"type": "float", "default": 20},
            "backends": {"type": "list", "elements": "str"},
            "wanted": {"type": "dict", "default": {}},
            "revisions": {"type": "dict", "default": {}},
            "model_path": {"type": "str"},
            "instance": {"type": "str", "default": "default"},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        request = _probe.Request(
            venv=given["venv"],
            subsets=_probe.expand_subsets(given["gather_subset"]),
            level=given["gather_level"],
            user=given["probe_user"] or None,
            environment=given["probe_environment"],
            import_timeout=given["import_timeout"],
            command_timeout=given["command_timeout"],
            backends=given["backends"] or (),
            wanted=_probe.check_wanted(given["wanted"], given["backends"] or ()),
            revisions={str(name): str(value) for name, value in given["revisions"].items()},
            model_path=given["model_path"] or None,
            instance=_probe.check_instance(given["instance"]),
        )
    except ValueError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, probe=_probe.probe(request))


if __name__ == "__main__":
    main()
