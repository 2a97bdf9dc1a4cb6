#!/usr/bin/python
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: service_unit
short_description: Deploy, stop, accept, roll back and remove the systemd unit of an SGLang instance
version_added: 0.1.0
description:
  - Writes C(sglang-<instance>.service) for a plan of M(gpufleet.sglang.launch_plan). The process gets the plan's argv
    byte for byte; this is read back from the unit before it is used and from C(/proc) after the start.
  - Each unit with its environment and the versions of the libraries it runs on is a revision. A new one is staged,
    checked by C(systemd-analyze verify), and swapped in by a single rename, so that whatever boots is whole.
  - The service is restarted only when what runs is not what is wanted. A library that was replaced in the venv counts.
  - Does not wait until the model is served; that is M(gpufleet.sglang.service_ready). Accept the revision after it.
  - Makes the service's system user and group, without login, where they do not exist.
options:
  instance:
    description: Name of the instance.
    type: str
    default: default
  state:
    description:
      - V(started) brings the host to the plan's revision and starts it.
      - V(stopped) stops the service and ends what is left in its cgroup. The unit stays enabled.
      - V(absent) removes unit, environment, secrets and revisions. Weights and caches stay unless O(purge).
      - V(accepted) remembers the running revision as the last good one.
      - V(rolled_back) goes back to O(revision) or to the last good one and starts it. When no revision was ever
        accepted, the service is stopped and disabled, and a unit that was taken over runs again. Packages are not
        restored by this module; RV(packages) says which journals of M(gpufleet.sglang.backend_packages) to take back
        first, while the service is stopped.
      - V(claimed) notes that O(run) is about to change the instance. A run that claimed it before can then neither stop
        nor start it any more. Refused when O(revision) is not the current one.
      - V(observed) only tells what is there.
    type: str
    choices: [started, stopped, absent, claimed, accepted, rolled_back, observed]
    default: started
  plan:
    description: The plan that M(gpufleet.sglang.launch_plan) returned. Needed for O(state=started).
    type: dict
  secrets:
    description:
      - Values of secrets by name. C(hf_token) is handed over as a file, a name in capitals as an environment variable,
        any other name as the flag of that name in a file that SGLang reads with C(--config).
      - They are in no unit, argument list, result or log of Ansible.
    type: dict
    default: {}
  takeover:
    description:
      - A unit made by others that this one replaces. It is stopped and disabled when ours is swapped in, and it is back
        as it was after O(state=rolled_back) when no revision of ours was ever accepted.
    type: str
  revision:
    description:
      - For O(state=rolled_back), the revision to go back to.
      - For O(state=accepted), the one that must be running; for O(state=claimed), the one that must be current.
    type: str
  run:
    description:
      - The run on whose behalf this is done; any text that no other run has.
      - V(started) and V(stopped) are then refused once another run claimed the instance. V(rolled_back) leaves only a
        revision that this run deployed, or found when it claimed the instance; otherwise it touches nothing and
        returns RV(overtaken). After V(accepted) it goes back to what was the last good revision before.
      - There is no time limit, and what a killed run claimed hinders nobody, the last claim counts.
    type: str
  proven:
    description:
      - With O(state=claimed), the current revision becomes the last good one, since another rank of the same
        deployment was accepted already.
    type: bool
    default: false
  purge:
    description: With O(state=absent), also remove the instance's own state and cache folders. Weights elsewhere stay.
    type: bool
    default: false
  wait_for_gpus:
    description:
      - Number of GPUs that must be there before the service starts. V(0) does not wait.
      - Taken from the plan if not given.
    type: int
  unit_overrides:
    description:
      - Settings for the unit, by section and name. A value replaces ours, a list gives the setting several times.
    type: dict
    default: {}
  read_only_paths:
    description: Further folders that the service reads.
    type: list
    elements: path
    default: []
  read_write_paths:
    description: Folders outside its own state and cache that the service writes to. They must exist.
    type: list
    elements: path
    default: []
  accept_problems:
    description: Codes of problems that must not stop the deploy.
    type: list
    elements: str
    default: []
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details: Secrets are only said to have changed.
  idempotent:
    support: full
requirements:
  - systemd 247 or later
  - root on the host (C(become))
author:
  - gpufleet.sglang contributors (@gpufleet)
seealso:
  - module: gpufleet.sglang.launch_plan
  - module: gpufleet.sglang.service_ready
"""

EXAMPLES = r"""
- name: Run the plan
  gpufleet.sglang.service_unit:
    instance: default
    state: started
    plan: "{{ plans['default'] }}"
    secrets: "{{ sglang_secrets }}"
  become: true
  register: unit

- name: Remember it as good, after readiness
  gpufleet.sglang.service_unit:
    instance: default
    state: accepted
    revision: "{{ unit.revision }}"
  become: true

- name: Go back to the last good revision
  gpufleet.sglang.service_unit:
    instance: default
    state: rolled_back
  become: true

- name: Remove one of several instances with its caches
  gpufleet.sglang.service_unit:
    instance: canary
    state: absent
    purge: true
  become: true
"""

RETURN = r"""
revision:
  description: The revision that the request is about; the current one where it is about none.
  type: str
  returned: always
  sample: 5f0c9a1be27d44e3
current:
  description: The revision of the unit file, which is what boots.
  type: str
  returned: always
last_good:
  description: The revision that was accepted last.
  type: str
  returned: always
running_revision:
  description: The revision that the running process was started with, read from its environment.
  type: str
  returned: always
needs:
  description: What has to be done to reach the state; in check mode, what would be done.
  type: dict
  returned: always
  sample: {write: true, start: false, restart: true}
differences:
  description: What changes against the current revision.
  type: list
  elements: dict
  returned: always
  sample: [{what: flag, name: --tp-size, before: "4", after: "8"}]
problems:
  description: What on the host stands against the service, with severity C(error) (stops the deploy) or C(warning).
  type: list
  elements: dict
  returned: always
  sample:
    - code: port_taken
      severity: error
      message: port 30000 on 0.0.0.0 is held by pid 4711 (python, old.service); stop it, or choose another sglang_port
limits_not_granted:
  description: Resource limits of the unit that the kernel did not grant to the process.
  type: list
  elements: dict
  returned: for started and observed
  sample: [{limit: LimitMEMLOCK, wanted: infinity, granted: "8388608", code: memlock_effective_below_unit}]
pid:
  description: Main process of the unit, null when none runs.
  type: int
  returned: always
active_state:
  description: systemd's word for the unit's state.
  type: str
  returned: always
enabled:
  description: Whether the unit starts at boot.
  type: bool
  returned: always
unit:
  description: Name of the unit.
  type: str
  returned: always
unit_file:
  description: Path of the unit.
  type: str
  returned: always
argv:
  description: The argv of the process.
  type: list
  elements: str
  returned: for started and rolled_back
api_key_file:
  description: Root-only file with the API key on the host, null when the instance has none.
  type: str
  returned: for started and rolled_back
log_namespace:
  description: Namespace of the journal that the service logs to, null for the usual journal.
  type: str
  returned: for started and rolled_back
taken_over:
  description: The unit that this one replaces, with its argv, and how its flags differ from the plan's.
  type: dict
  returned: for started, absent and observed
restored:
  description: The taken-over unit that was put back, null when there was none.
  type: str
  returned: for rolled_back, when no revision was ever accepted
rolled_back_from:
  description: The revision that was left.
  type: str
  returned: for rolled_back
libraries_differ:
  description: Libraries of the venv that are not those the revision ran with.
  type: list
  elements: dict
  returned: for rolled_back
packages:
  description:
    - How the venv gets the libraries that the revision ran with.
    - C(journals) are those of M(gpufleet.sglang.backend_packages) to be taken back, newest first. C(reason) says why
      there is no way, and is empty where there is one or none is needed.
    - C(others) are further instances of the host that run from the same venv.
  type: dict
  returned: for rolled_back, when there is a revision to go back to
  sample: {venv: /opt/sglang/venv, journals: [20261130T231244Z-d30ebf8a], reason: "", others: []}
overtaken:
  description: That another run changed the instance meanwhile, and that nothing was touched.
  type: str
  returned: for rolled_back, when it is so
claim:
  description: The run that claimed the instance last, and the one that deployed its current revision.
  type: dict
  returned: always
  sample:
    run: "1764551234.5"
    user: ops
    since: "2026-11-30T23:12:44Z"
    open: true
    deployed: {run: "1764551234.5", revision: 5f0c9a1be27d44e3}
    good: "1764500000.1"
revisions:
  description: The stored revisions, oldest first.
  type: list
  elements: dict
  returned: for observed
removed:
  description: Paths that were removed.
  type: list
  elements: str
  returned: for absent
stopped_pids:
  description: Processes that were in the unit's cgroup.
  type: list
  elements: int
  returned: for stopped
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import run
from ansible_collections.gpufleet.sglang.plugins.module_utils._service_unit import (
    Host,
    Request,
    ServiceError,
    ServiceUnit,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "default": "default"},
            "state": {
                "type": "str",
                "choices": ["started", "stopped", "absent", "claimed", "accepted", "rolled_back", "observed"],
                "default": "started",
            },
            "plan": {"type": "dict"},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "takeover": {"type": "str"},
            "revision": {"type": "str"},
            "purge": {"type": "bool", "default": False},
            "wait_for_gpus": {"type": "int"},
            "unit_overrides": {"type": "dict", "default": {}},
            "read_only_paths": {"type": "list", "elements": "path", "default": []},
            "read_write_paths": {"type": "list", "elements": "path", "default": []},
            "accept_problems": {"type": "list", "elements": "str", "default": []},
            "run": {"type": "str"},
            "proven": {"type": "bool", "default": False},
        },
        required_if=[("state", "started", ["plan"]), ("state", "claimed", ["run"])],
        supports_check_mode=True,
    )
    if os.geteuid() != 0:
        module.fail_json(msg="service_unit writes system units and needs root: add become to the task")
    # Ansible hides the values of a dict option only where it sees them; ours are hidden wherever they turn up.
    module.no_log_values.update(str(value) for value in module.params["secrets"].values() if value)
    request = Request(
        plan=module.params["plan"] or {},
        check_mode=module.check_mode,
        **{name: module.params[name] for name in module.params if name != "plan"},
    )
    try:
        result = ServiceUnit(Host(run=run), request).apply()
    except ServiceError as error:
        module.fail_json(msg=str(error), **error.details)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
