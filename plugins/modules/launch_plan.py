# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of launch_plan; the work is done by the action plugin of this name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: launch_plan
short_description: Plan an SGLang instance from what is wanted and what is there
version_added: 0.1.0
author: the gpufleet.sglang contributors (@gpufleet)
description:
  - Turns one instance of P(gpufleet.sglang.intents#filter) and the result of M(gpufleet.sglang.probe_info) into a
    command line, an environment and the remedies that come first. Runs on the controller without a connection.
  - Every decision carries its reason and evidence. A plan that must not be applied has RV(plan.rejections), all of them
    at once, each with numbers and a suggestion.
  - Flags are checked against the arguments that the installed SGLang itself defines.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
  - gpufleet.sglang.attributes.info
attributes:
  diff_mode:
    support: full
    description: Shows how the running service differs from the plan.
options:
  intent:
    description: One of RV(ignore:intents.instances). Without it only wanted backends are planned.
    type: dict
  probe:
    description: What M(gpufleet.sglang.probe_info) returned as RV(ignore:probe).
    type: dict
    required: true
  backends:
    description: Backends wanted without or beside the service, with their uses.
    type: dict
    default: {}
  settings:
    description: RV(ignore:intents.settings).
    type: dict
    default: {}
  problems:
    description: RV(ignore:intents.problems); errors among them become rejections.
    type: list
    elements: dict
    default: []
  host:
    description: Inventory name that messages carry. By default the host of the task.
    type: str
  running:
    description:
      - What is running, as C(argv) (the words of C(/proc/PID/cmdline)) and C(server_info) (the answer of
        C(/server_info)).
      - By default the command line of the running service that the probe saw.
    type: dict
  fail_on_rejection:
    description:
      - Fail when the plan has rejections. The playbooks leave this to M(gpufleet.sglang.fleet_plan), which sees all
        hosts.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Plan the default instance
  gpufleet.sglang.launch_plan:
    intent: "{{ intents.instances.default }}"
    probe: "{{ probe }}"
    backends: "{{ intents.backends }}"
    settings: "{{ intents.settings }}"
    problems: "{{ intents.problems }}"
  register: planned

- name: Show the plan
  ansible.builtin.debug:
    msg: "{{ planned.plan | gpufleet.sglang.plan_text }}"
"""

RETURN = r"""
plan:
  description: The plan.
  returned: success
  type: dict
  contains:
    instance:
      description: Name of the instance.
      type: str
    service:
      description: Whether there is a service; V(false) for a host whose backends only are mended.
      type: bool
    argv:
      description: Words of the command line.
      type: list
      elements: str
      sample: [/opt/sglang/venv/bin/python, -m, sglang.launch_server, --model-path, /models/Kimi-K2.6, --tp-size, "8"]
    env:
      description: Environment of the service, without secrets.
      type: dict
    effective:
      description: Sizes and backends as SGLang will compute them.
      type: dict
    remedies:
      description: What has to be mended first, with backend, use, state, code, kind, summary, steps and required.
      type: list
      elements: dict
    assumes:
      description: States that the plan takes for granted after its remedies.
      type: list
      elements: dict
    decisions:
      description: Question, answer, because and evidence of each decision.
      type: list
      elements: dict
    warnings:
      description: What to mind, with code, message, flag or variable, and value.
      type: list
      elements: dict
    rejections:
      description: Why it must not be applied, with code, message, flag or variable, value, numbers and suggestion.
      type: list
      elements: dict
    secret_flags:
      description: Names of the secrets that are handed over with C(--config).
      type: list
      elements: str
    secret_env:
      description: Names of the other secrets, with the environment variable of each.
      type: dict
    unit:
      description: What M(gpufleet.sglang.service_unit) needs besides argv and env.
      type: dict
drift:
  description: How the running service differs from the plan, with setting, planned, running and source.
  returned: when the service runs, or O(running) is given
  type: list
  elements: dict
"""
