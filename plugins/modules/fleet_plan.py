# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of fleet_plan; the work is done by the action plugin of this name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_plan
short_description: Accept or refuse the plans of a whole run, and cut it into waves
version_added: 0.1.0
author: the gpufleet.sglang contributors (@gpufleet)
description:
  - Runs once for the play. Reads the plans of all its hosts, refuses the run when one of them must not be applied, and
    otherwise cuts it into waves of whole instances. An instance over several hosts is never split.
  - A wave never takes all replicas of a failure domain, and never all prefill or all decode instances of a group, where
    there are several. Where there is one, the run goes on and says that requests fail while it restarts.
  - Prefill and decode instances of a group that cannot work together (transfer backend, SGLang, model, page size, KV
    cache dtype, sizes) are refused.
  - Hosts of the group that were not probed are unreachable. A limit that covers a part of an instance is refused.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
  - gpufleet.sglang.attributes.info
options:
  group:
    description: Group whose hosts make up the run, as far as the play has them.
    type: str
    default: sglang
  waves:
    description:
      - Sizes of the waves, as counts of instances and percentages; the last one repeats. By default what the hosts'
        C(sglang_waves) says; where they differ, the way that takes the most waves.
    type: list
    elements: raw
  on_rejection:
    description:
      - Stop the run when a plan is rejected, or leave the host out. By default what the host's own
        C(sglang_on_rejection) says.
    type: str
    choices: [stop, skip]
  on_unreachable:
    description:
      - Stop the run when a host was not probed, or leave it out. By default what the host's own
        C(sglang_on_unreachable) says.
    type: str
    choices: [stop, skip]
  intents_fact:
    description: Fact of each host with its intents.
    type: str
    default: sglang_resolved
  plans_fact:
    description: Fact of each host with its plans by instance.
    type: str
    default: probe_plans
  probes_fact:
    description: Fact of each host with its probes by venv.
    type: str
    default: probe_results
  fail_on_rejection:
    description: Fail when the run is not accepted, with every reason in one message.
    type: bool
    default: true
"""

EXAMPLES = r"""
- name: Judge all plans together
  gpufleet.sglang.fleet_plan:
    group: sglang
  register: judged

- name: Show the waves
  ansible.builtin.debug:
    var: judged.fleet.waves
"""

RETURN = r"""
fleet:
  description: What was decided for the run.
  returned: when it is accepted, or O(fail_on_rejection=false)
  type: dict
  contains:
    accepted:
      description: Whether anything may be changed.
      type: bool
    rejections:
      description: Why not, with host, instance, code, message, variable, value and suggestion.
      type: list
      elements: dict
    warnings:
      description: What the run goes on with, with host, instance, code, message and suggestion.
      type: list
      elements: dict
    skipped:
      description: Hosts that are left out, with the reason.
      type: list
      elements: dict
    waves:
      description: Waves of instances, each with its hosts.
      type: list
      elements: list
      sample: [[{"instance": "default", "hosts": ["gpu-01"]}], [{"instance": "default", "hosts": ["gpu-02"]}]]
    serial:
      description: Numbers of hosts of the waves.
      type: list
      elements: int
    order:
      description: Hosts in the order of the waves.
      type: list
      elements: str
    builders:
      description: Which host builds DeepEP for which others.
      type: list
      elements: dict
    wheels:
      description: Where there are builders, which host keeps which DeepEP wheel of an earlier run, by fingerprint.
      type: dict
    message:
      description: The decision in words.
      type: str
"""
