#!/usr/bin/python
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rendezvous_info
short_description: Try whether the hosts of an instance can meet before their ranks are started
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Run it on all hosts of an instance in one task. Rank 0 listens on the address and port that the ranks will use, the
    others reach it there. What stands in the way is told by host.
  - The named network interfaces are looked at, too.
  - Fails when there are problems.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
  - gpufleet.sglang.attributes.info
options:
  instance:
    description: Name of the instance.
    type: str
    default: default
  address:
    description: Address of rank 0, as the ranks are given it.
    type: str
    required: true
  port:
    description: Port of rank 0.
    type: int
    required: true
  node_rank:
    description: Rank of this host.
    type: int
    required: true
  hosts:
    description: Hosts of the instance in the order of their ranks.
    type: list
    elements: str
    required: true
  interfaces:
    description: Values of C(NCCL_SOCKET_IFNAME) and its like.
    type: list
    elements: str
    default: []
  together:
    description: Whether all hosts run this at the same time. If not, only a route and a free port are looked for.
    type: bool
    default: true
  timeout:
    description: Seconds that the hosts wait for each other.
    type: float
    default: 20
"""

EXAMPLES = r"""
- name: See whether the ranks can meet
  gpufleet.sglang.rendezvous_info:
    instance: kimi
    address: 10.0.0.1
    port: 20000
    node_rank: "{{ ['gpu-01', 'gpu-02'].index(inventory_hostname) }}"
    hosts: [gpu-01, gpu-02]
"""

RETURN = r"""
problems:
  description: What keeps this rank from the rendezvous, each with C(code) and C(message).
  returned: always
  type: list
  elements: dict
  sample: [{code: rendezvous_unreachable, message: "10.0.0.1:20000 is not reached from here: No route to host"}]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils import _rendezvous


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "default": "default"},
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "node_rank": {"type": "int", "required": True},
            "hosts": {"type": "list", "elements": "str", "required": True},
            "interfaces": {"type": "list", "elements": "str", "default": []},
            "together": {"type": "bool", "default": True},
            "timeout": {"type": "float", "default": 20},
        },
        supports_check_mode=True,
    )
    params = module.params
    problems = _rendezvous.check_interfaces(params["interfaces"])
    problems += _rendezvous.meet(
        params["address"], params["port"], params["node_rank"], params["hosts"], params["instance"],
        params["timeout"], params["together"],
    )  # fmt: skip
    if problems:
        told = "; ".join(item["message"] for item in problems)
        module.fail_json(
            msg=f"instance {params['instance']}, rank {params['node_rank']}: {told} (sglang_rendezvous)",
            problems=problems,
        )
    module.exit_json(changed=False, problems=[])


if __name__ == "__main__":
    main()
