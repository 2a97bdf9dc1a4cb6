#!/usr/bin/python
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: backend_packages
short_description: Carry out remedies in a target venv
version_added: 1.0.0
description:
  - Installs, swaps and repairs communication libraries in a virtual environment as the plan's remedies say,
    and can bring back what was there before.
  - Everything that can fail for outside reasons (resolving, downloading, building a wheel) happens before the first
    file is touched. Then the files that will be replaced are kept, and C(pip) works from local wheels, without an
    index and without dependencies.
  - When a step fails, the venv is put back as it was. When the module is killed, its next run puts the venv back and
    does the same steps again, from the wheels that it has; call it with the plan's remedies, or with none.
  - C(pip) runs as the owner of the venv, with that user's C(pip.conf) and the host's C(PIP_*) variables. A venv that is
    not root's is never run as root.
  - Torch, NCCL, SGLang, Triton and everything that no step names stay as they are; the module stops beforehand when
    C(pip) would change them.
  - A step without C(--no-deps) lets C(pip) resolve. Dependencies that are not there yet come along then.
  - Run it only while no service uses the venv; it refuses when a process has one of the files mapped.
notes:
  - As root, the journal is kept in C(/var/lib/gpufleet-sglang/journal). A user who is not root and owns the venv can
    use the module when no system package is missing; the journal is then C(.gpufleet-sglang/journal) inside the venv.
  - Steps C(set_env), C(build) and C(manual) are not for this module and are returned in RV(not_executed).
  - System packages that were installed stay installed when a venv is restored.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
    details: Nothing is written and C(pip) is not run, so a version that the index lacks shows in the real run only.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  venv:
    description: The target venv, or its interpreter.
    type: path
    required: true
  remedies:
    description:
      - C(plan.remedies) of M(gpufleet.sglang.launch_plan). Remedies that ask for the same are done once.
      - Of each, C(backend) (for messages) and C(steps) are looked at. A step is C({action, packages, args}).
      - C(pip_uninstall) and C(pip_install) take exact requirements (V(name==version)) or the absolute path of a wheel
        on the host; C(pip_install) takes C(args.flags), default V(--no-deps).
      - C(os_install) takes names of system packages and C(args.manager), V(apt) or V(dnf).
    type: list
    elements: dict
    default: []
  wheelhouse:
    description: A folder of wheels on the host. When set, C(pip) asks no index.
    type: path
  pip_args:
    description:
      - More arguments for resolving and fetching, such as an index. Better kept in the C(pip.conf) of the venv's owner.
    type: list
    elements: str
    default: []
  manage_system_packages:
    description: Whether V(os_install) steps are carried out. When not, they are skipped and reported in RV(problems).
    type: bool
    default: false
  state:
    description:
      - V(applied) carries the remedies out.
      - V(restored) brings back the files that were replaced and removes what was added.
    type: str
    choices: [applied, restored]
    default: applied
  journal_id:
    description:
      - For O(state=applied), the name of the journal entry; made when left out, and numbered when it exists.
      - For O(state=restored), the entry to go back before; later ones of the same venv are taken back too. When left
        out, what was interrupted is taken back, else the newest entry.
    type: str
  journal_ids:
    description:
      - For O(state=restored), exactly these entries. Refused when the venv was changed since, by another entry or by
        hand, and when a process has one of the files mapped.
    type: list
    elements: str
    default: []
  allow_changes:
    description: Distributions that may change although no step names them or although they are protected.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds for each command.
    type: int
    default: 1800
  lock_wait:
    description: Seconds to wait for another run on the same venv.
    type: int
    default: 60
  keep_journals:
    description:
      - How many entries of a venv are kept for O(state=restored).
      - Beyond them, entries are kept that lead back to a stored revision of M(gpufleet.sglang.service_unit).
    type: int
    default: 5
  refuse_in_use:
    description: Whether to stop when a process has one of the files mapped that would be replaced.
    type: bool
    default: true
author:
  - the gpufleet.sglang contributors (@gpufleet)
"""

EXAMPLES = r"""
- name: Give a CUDA 13 venv the mooncake that fits
  gpufleet.sglang.backend_packages:
    venv: /opt/sglang/venv
    remedies:
      - backend: mooncake
        kind: replace
        steps:
          - {action: pip_uninstall, packages: [mooncake-transfer-engine, mooncake-transfer-engine-cuda13]}
          - action: pip_install
            packages: [mooncake-transfer-engine-cuda13==0.3.14]
            args: {flags: [--no-deps, --force-reinstall]}
  become: true
  register: mended

- name: Carry out the remedies of a plan on a host without an index
  gpufleet.sglang.backend_packages:
    venv: /opt/sglang/venv
    remedies: "{{ planned.plan.remedies }}"
    wheelhouse: /srv/wheels
    manage_system_packages: true
  become: true

- name: Bring back what was there before
  gpufleet.sglang.backend_packages:
    venv: /opt/sglang/venv
    state: restored
    journal_id: "{{ mended.journal_id }}"
  become: true
"""

RETURN = r"""
steps:
  description: What was done, in order. In check mode the state of what would be done is V(pending).
  returned: always
  type: list
  elements: dict
  contains:
    action: {description: The action; V(restore) for O(state=restored)., type: str, returned: always}
    packages: {description: What it was about., type: list, elements: str, returned: always}
    state: {description: "V(done), V(skipped) or V(pending).", type: str, returned: always}
    reason: {description: Why it was skipped., type: str, returned: when skipped}
    stdout_tail:
      description: The last lines of the command's output, without credentials.
      type: list
      elements: str
      returned: always
not_executed:
  description: Steps that are not for this module (C(set_env), C(build), C(manual)).
  returned: success
  type: list
  elements: dict
problems:
  description: What was left undone and why.
  returned: always
  type: list
  elements: dict
  sample: [{code: system_packages_not_managed, message: "libibverbs1 missing: …", packages: [libibverbs1]}]
restart_needed:
  description: Whether a service in this venv must be started anew to see the change.
  returned: success
  type: bool
journal_id:
  description: The journal entry of this change, for O(state=restored). None when the venv was not changed.
  returned: success
  type: str
recovered:
  description: Entries that an earlier run had left unfinished and that this run brought to an end.
  returned: success
  type: list
  elements: str
code:
  description: A stable word for the cause of a failure.
  returned: failure
  type: str
  sample: would_change_others
command:
  description: The command that failed, without credentials.
  returned: when a command failed
  type: str
restored:
  description: Whether the venv was put back as it was.
  returned: when a change failed
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils import _backend_packages


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "venv": {"type": "path", "required": True},
            "remedies": {"type": "list", "elements": "dict", "default": []},
            "wheelhouse": {"type": "path"},
            "pip_args": {"type": "list", "elements": "str", "default": []},
            "manage_system_packages": {"type": "bool", "default": False},
            "state": {"type": "str", "choices": ["applied", "restored"], "default": "applied"},
            "journal_id": {"type": "str"},
            "journal_ids": {"type": "list", "elements": "str", "default": []},
            "allow_changes": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 1800},
            "lock_wait": {"type": "int", "default": 60},
            "keep_journals": {"type": "int", "default": 5},
            "refuse_in_use": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    params = dict(module.params)
    options = _backend_packages.Options(
        restore=params.pop("state") == "restored", check_mode=module.check_mode, **params
    )
    try:
        module.exit_json(**_backend_packages.work(options))
    except _backend_packages.Failure as failure:
        module.fail_json(msg=str(failure), **failure.fields)


if __name__ == "__main__":
    main()
