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
  - Then the others reach rank 0 on a port that nobody agreed on, and over the interfaces that O(interfaces) names, as
    NCCL and Gloo will do.
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
    description: What the service's environment says of interfaces, by the names of its variables.
    type: dict
    default: {}
  together:
    description: Whether all hosts run this at the same time. If not, only a route and a free port are looked for.
    type: bool
    default: true
  running:
    description: The instance runs still, so that its port is not looked at. Only with O(together=false).
    type: bool
    default: false
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
    interfaces: {NCCL_SOCKET_IFNAME: ib0, GLOO_SOCKET_IFNAME: eth0}
"""

RETURN = r"""
problems:
  description: What keeps this rank from the rendezvous, each with C(code), C(message) and C(mend).
  returned: always
  type: list
  elements: dict
  sample:
    - code: rendezvous_unreachable
      message: "10.0.0.1:20000 is not reached from here: No route to host"
      mend: see that the firewalls of both hosts let it through, and that sglang_rendezvous is rank 0's address
cause:
  description: The first of RV(problems).
  returned: failure
  type: dict
"""

import socket

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
            "interfaces": {"type": "dict", "default": {}},
            "together": {"type": "bool", "default": True},
            "running": {"type": "bool", "default": False},
            "timeout": {"type": "float", "default": 20},
        },
        supports_check_mode=True,
    )
    params = module.params
    interfaces = {name: str(value) for name, value in params["interfaces"].items()}
    problems = _rendezvous.check_interfaces(interfaces)
    problems += _rendezvous.check_loopback(params["address"], interfaces, socket.gethostname())
    problems += _rendezvous.meet(
        params["address"], params["port"], params["node_rank"], params["hosts"], params["instance"],
        params["timeout"], params["together"], params["running"] and not params["together"], interfaces,
    )  # fmt: skip
    if problems:
        told = "; ".join(f"{item['message']} [{item['code']}]; mend: {item['mend']}" for item in problems)
        module.fail_json(
            msg=f"instance {params['instance']}, rank {params['node_rank']}: {told}",
            problems=problems,
            cause=problems[0],
        )
    module.exit_json(changed=False, problems=[])


if __name__ == "__main__":
    main()
