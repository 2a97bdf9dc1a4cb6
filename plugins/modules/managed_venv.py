#!/usr/bin/python
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: managed_venv
short_description: Make an immutable virtual environment from a lock
version_added: 1.0.0
description:
  - Makes C(<base>/<hash>), a virtual environment whose name is the hash of the lock and of the interpreter's version,
    ABI, machine and C library. Another lock gives another path; what runs from the old one is not touched.
  - A virtual environment cannot be moved, so it is built where it will be. C(.complete) in it is written last, after
    C(pip check) and the imports in O(prove_imports); without it, the next run builds anew.
  - Only what the lock names is installed (C(--no-deps)). It must pin everything with C(==), or with hashes throughout.
  - Building and C(pip) run as O(owner). A failed build leaves nothing.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
    details: Tells the path and whether it would be built; does not ask an index.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  lock:
    description:
      - The text of the lock, as C(pip) reads requirements; comments, order and spaces do not matter to the hash.
      - It names no index, since that belongs into the C(pip.conf) of the owner.
    type: str
    required: true
  base:
    description: The folder of the managed environments.
    type: path
    default: /opt/sglang/environments
  python:
    description: The interpreter, a path or a name on the PATH.
    type: str
    default: python3
  owner:
    description: The user to whom the environment belongs. Default is the user that runs the module.
    type: str
  wheelhouse:
    description: A folder of wheels on the host. When set, C(pip) asks no index.
    type: path
  pip_args:
    description: More arguments for C(pip install), such as an index.
    type: list
    elements: str
    default: []
  prove_imports:
    description: Modules that must import in the new environment, each in its own process.
    type: list
    elements: str
    default: []
  prove_consistent:
    description: Whether C(pip check) must find nothing. Turn it off for a lock that overrides SGLang's own pins.
    type: bool
    default: true
  keep:
    description:
      - How many other environments in O(base) are kept; older ones that no process uses and no unit or recorded
        revision names are removed, and so are half-built ones. Without it nothing is removed.
    type: int
  timeout:
    description: Seconds for each command.
    type: int
    default: 3600
  lock_wait:
    description: Seconds to wait for another run that builds in the same folder.
    type: int
    default: 60
author:
  - the gpufleet.sglang contributors (@gpufleet)
"""

EXAMPLES = r"""
- name: Make the environment of a lock
  gpufleet.sglang.managed_venv:
    lock: "{{ lookup('ansible.builtin.file', 'sglang-0.5.23.lock') }}"
    owner: sglang
    prove_imports: [torch]
  become: true
  register: environment

- name: The same without an index, and without the environments before the last two
  gpufleet.sglang.managed_venv:
    lock: "{{ lookup('ansible.builtin.file', 'sglang-0.5.23.lock') }}"
    python: /usr/bin/python3.12
    wheelhouse: /srv/wheels
    keep: 2
  become: true
"""

RETURN = r"""
path:
  description: The environment, as O(gpufleet.sglang.backend_packages#module:venv) and the plan take it.
  returned: success
  type: str
  sample: /opt/sglang/environments/3f2a9c41d0b7e865
hash:
  description: The hash of lock and interpreter.
  returned: success
  type: str
python_version:
  description: The version of the interpreter.
  returned: success
  type: str
distributions:
  description: What C(pip freeze --all) says of a new environment.
  returned: when it was built
  type: list
  elements: str
removed:
  description: Environments that were removed (in check mode, would be).
  returned: success
  type: list
  elements: str
code:
  description: A stable word for the cause of a failure.
  returned: failure
  type: str
  sample: lock_conflicts
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils import _managed_venv


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "lock": {"type": "str", "required": True},
            "base": {"type": "path", "default": "/opt/sglang/environments"},
            "python": {"type": "str", "default": "python3"},
            "owner": {"type": "str"},
            "wheelhouse": {"type": "path"},
            "pip_args": {"type": "list", "elements": "str", "default": []},
            "prove_imports": {"type": "list", "elements": "str", "default": []},
            "prove_consistent": {"type": "bool", "default": True},
            "keep": {"type": "int"},
            "timeout": {"type": "int", "default": 3600},
            "lock_wait": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    if module.params["keep"] is not None and module.params["keep"] < 0:
        module.fail_json(msg=f"keep must be 0 or more, and is {module.params['keep']}")
    try:
        module.exit_json(**_managed_venv.work(_managed_venv.Options(check_mode=module.check_mode, **module.params)))
    except _managed_venv.Failure as failure:
        module.fail_json(msg=str(failure), **failure.fields)


if __name__ == "__main__":
    main()
