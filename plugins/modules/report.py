#!/usr/bin/python
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: report
short_description: Show what a run found and did, and write it to files
version_added: 0.1.0
description:
  - Reads what the roles kept of each host (probes before and after, plans, readiness, failures), prints a table, what
    to do next and one line of summary, and writes C(report.json) and C(report.html) to a folder of the controller.
  - The page needs nothing beside itself and can be opened from the disk. The JSON follows
    C(docs/schemas/report.schema.json), and the playbook
    C(remediate) reads it (C(sglang_apply_report)).
  - Values of C(sglang_secrets) are replaced wherever they appear, also in log lines.
  - Runs on the controller, without a connection to any host, for all hosts at once; give it C(run_once).
options:
  hosts:
    description: Hosts that the report is about, in the order to show them.
    type: list
    elements: str
    required: true
  kind:
    description: What kind of run it was.
    type: str
    choices: [probe, site, remediate, verify, rollback]
    default: probe
  directory:
    description:
      - Folder on the controller for the files; made if it is not there. Nothing is written when it is empty.
      - Files are replaced whole. C(report.json) and C(report.html) are of the latest run.
    type: path
  width:
    description: Columns that the table may take, at least 100.
    type: int
    default: 140
extends_documentation_fragment:
  - gpufleet.sglang.attributes
  - gpufleet.sglang.attributes.info
attributes:
  check_mode:
    details: Files are written in check mode, too; they say what would be done.
author:
  - gpufleet.sglang contributors (@gpufleet)
seealso:
  - module: gpufleet.sglang.probe_info
  - module: gpufleet.sglang.launch_plan
"""

EXAMPLES = r"""
- name: Report
  gpufleet.sglang.report:
    hosts: "{{ ansible_play_hosts_all }}"
    kind: verify
    directory: "{{ playbook_dir }}/artifacts"
  run_once: true
"""

RETURN = r"""
summary:
  description: Counts of hosts, services, states and next steps, and C(text) with the same in one line.
  type: dict
  returned: always
  sample: {hosts: 3, ok: 1, attention: 2, failed: 0, unreachable: 0, text: "3 hosts: 1 ok, 2 to mend"}
next_steps:
  description: What to do next, what mends most hosts first.
  type: list
  elements: dict
  returned: always
  sample:
    - backend: mooncake
      code: missing_system_lib
      count: 1
      hosts: [gpu-c]
      kind: system_package
      required: true
      summary: install libnuma1 and libibverbs1
files:
  description: Files that were written.
  type: list
  elements: str
  returned: always
"""
