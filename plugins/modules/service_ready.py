#!/usr/bin/python
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: service_ready
short_description: Wait until an SGLang service is ready, dead, or without progress for too long
version_added: 0.1.0
author: the gpufleet.sglang contributors (@gpufleet)
description:
  - Ready means that the service has served. Several successes in a row are needed, among them real generations of the
    right model (one short and one long prompt), by a process of this unit and of this revision. An answer from another
    process on the port is a failure.
  - Slow is not dead. The deadline moves while measured progress is seen (weights, kernel compilation, graph capture,
    token counters), up to O(hard_timeout). Nothing new at all for O(stall_timeout) ends the wait earlier.
  - Dead is told at once, with the first error of the first failed start, its cause code, and the mend.
  - It runs as an action plugin that calls the module in slices and prints the progress, at least once a minute.
  - Probes are patient and go out one at a time. A probe runs in a detached child on the host. It outlives the slice
    that sent it, and is never aborted when the slice ends.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
  - gpufleet.sglang.attributes.info
options:
  instance:
    description: The instance, as in C(sglang_instances).
    type: str
    default: default
  unit:
    description: The systemd unit. The default is C(sglang-<instance>.service).
    type: str
  foreground_pid:
    description: Judge this process (and its descendants) instead of a systemd unit.
    type: int
  log_file:
    description: Read the log here instead of in the journal.
    type: path
  mode:
    description:
      - V(wait) waits.
      - V(verify) looks once, with one short generation, and never fails; it also returns what is needed to say which
        backend is really in use.
    type: str
    choices: [wait, verify]
    default: wait
  host:
    description: The address that the service listens on.
    type: str
    default: 127.0.0.1
  port:
    description: The port that the service listens on.
    type: int
    default: 30000
  scheme:
    description:
      - How the service is spoken to.
      - When it is not given, C(https) where O(expected_argv), or else the running process, has C(--ssl-certfile).
    type: str
    choices: [http, https]
  verify_ca:
    description: A CA file on the host. Without one the certificate is not checked (the listener's process is).
    type: path
  tls_server_name:
    description: The name in the certificate; checked when O(verify_ca) is given.
    type: str
  model:
    description: The served model name that must answer. Not checked when absent.
    type: str
  expected_argv:
    description: The argv of the revision that must be running. Not checked when absent.
    type: list
    elements: str
  revision:
    description: The revision's name, for the report only. RV(revision) repeats it.
    type: str
  api_key_file:
    description: A file on the host with the API key (the bare key, or a YAML with C(api-key)). It is never returned.
    type: path
  role:
    description: The role in a disaggregated deployment. Such a server is asked as SGLang's own warm-up asks it.
    type: str
    choices: [prefill, decode]
  node_rank:
    description: Rank of this host in a multi-host instance. Ranks above 0 serve no requests and are judged by liveness.
    type: int
    default: 0
  members:
    description:
      - The hosts of a multi-host instance, in the order of their ranks. Give it when one task waits for all of them.
      - Ranks above 0 are then watched until rank 0 is ready. A rank that is dead ends the wait of the others within
        seconds, and RV(cause) and the message name its host.
      - Needs the strategy C(linear) and as many forks as there are members. Without them each rank waits for itself,
        and a rank above 0 is ready as soon as it is alive.
    type: list
    elements: str
    default: []
  hold:
    description: With O(node_rank) above 0, alive does not end the wait. Set by the action plugin.
    type: bool
    default: false
  successes:
    description: Successes in a row that make ready.
    type: int
    default: 3
  timeout:
    description: Seconds without being ready that are borne when no measured progress is seen.
    type: float
    default: 1800
  stall_timeout:
    description: Seconds without any sign of life that end the wait. Measured progress moves the deadline by as much.
    type: float
    default: 600
  hard_timeout:
    description: Seconds after which the wait ends whatever is seen.
    type: float
    default: 7200
  health_timeout:
    description: Time limit of one health probe; the server itself takes 20 seconds.
    type: float
    default: 30
  generation_timeout:
    description: Time limit of one generation.
    type: float
    default: 600
  was_ready_before:
    description: The same revision was ready before, so one short generation is proof enough.
    type: bool
    default: false
  tolerated_restarts:
    description: How many restarts by systemd are borne while waiting.
    type: int
    default: 0
  long_prompt_words:
    description: Length of the long prompt; a small context makes it shorter.
    type: int
    default: 600
  slice_seconds:
    description: Length of one slice, at most 45.
    type: float
    default: 30
  carry:
    description: State between the slices. Set by the action plugin.
    type: dict
seealso:
  - module: gpufleet.sglang.service_unit
"""

EXAMPLES = r"""
- name: Wait until the service is ready
  gpufleet.sglang.service_ready:
    instance: default
    port: 30000
    model: /models/Kimi-K2.6
    expected_argv: "{{ plan.argv }}"
    timeout: 1800
  become: true
  register: ready

- name: A process in the foreground, without systemd
  gpufleet.sglang.service_ready:
    foreground_pid: "{{ server.pid }}"
    log_file: /tmp/sglang.log
    port: 31000

- name: Look once
  gpufleet.sglang.service_ready:
    mode: verify
    expected_argv: "{{ plan.argv }}"
  become: true
  register: seen
"""

RETURN = r"""
ready:
  description: The service has served, by the right process.
  returned: always
  type: bool
state:
  description:
    - V(starting), V(loading), V(warming), V(ready), V(busy) (slow, but work goes on), V(degraded) (answers in part),
      V(stuck) (no progress, or the deadline passed), V(crash_loop), V(failed), V(stopped).
  returned: always
  type: str
  sample: warming
progress:
  description: One line about how far it is.
  returned: always
  type: str
  sample: loading weights 41 % (20 of 46, 1.20s/it)
cause:
  description: Why it is not ready; null when it is or may still become so.
  returned: always
  type: dict
  contains:
    code:
      description: The cause code; V(unknown) when no rule knows the failure.
      type: str
    message:
      description: The cause in plain words.
      type: str
    mend:
      description: What to do.
      type: str
    lines:
      description: The log lines around the first error, without secrets.
      type: list
      elements: str
observation:
  description: What was last seen (unit, process, listener, probe, events, tail).
  returned: always
  type: dict
followed:
  description: The rank whose end ended this wait; RV(cause) is then its cause.
  returned: when another rank of the instance ended first
  type: dict
  sample: {host: gpu-02, rank: 1, state: crash_loop}
history:
  description: The changes of state, with the seconds since the wait began.
  returned: always
  type: list
  elements: dict
  sample: [{at: 0.2, state: starting}, {at: 31.0, state: warming}, {at: 34.5, state: ready}]
server:
  description: What the server says of itself.
  returned: always
  type: dict
  sample: {version: 0.5.23, tp_size: 8}
evidence:
  description: What the verdict rests on (generations, paths asked, models served, the listener).
  returned: always
  type: dict
elapsed:
  description: Seconds that the wait took.
  returned: always
  type: float
deadline:
  description: When the wait would have ended, in seconds since it began.
  returned: always
  type: float
revision:
  description: The given revision.
  returned: always
  type: str
server_info:
  description: The server's resolved arguments, without secrets.
  returned: O(mode=verify), when the server tells them
  type: dict
maps:
  description: Libraries of the communication backends that the processes have loaded.
  returned: O(mode=verify)
  type: list
  elements: str
maps_complete:
  description: All processes could be looked into.
  returned: O(mode=verify)
  type: bool
log_backends:
  description: Backends whose use the start-up log shows.
  returned: O(mode=verify)
  type: list
  elements: str
unseen:
  description: What could not be looked at.
  returned: always
  type: list
  elements: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils import _observe as observe
from ansible_collections.gpufleet.sglang.plugins.module_utils._readiness import Settings
from ansible_collections.gpufleet.sglang.plugins.module_utils._run import run
from ansible_collections.gpufleet.sglang.plugins.module_utils._service_ready import (
    HostEyes,
    Options,
    failure_text,
    redact_server_info,
    run_slice,
    usable,
)

ARGUMENTS: dict[str, Any] = {
    "instance": {"type": "str", "default": "default"},
    "unit": {"type": "str"},
    "foreground_pid": {"type": "int"},
    "log_file": {"type": "path"},
    "mode": {"type": "str", "choices": ["wait", "verify"], "default": "wait"},
    "host": {"type": "str", "default": "127.0.0.1"},
    "port": {"type": "int", "default": 30000},
    "scheme": {"type": "str", "choices": ["http", "https"]},
    "verify_ca": {"type": "path"},
    "tls_server_name": {"type": "str"},
    "model": {"type": "str"},
    "expected_argv": {"type": "list", "elements": "str"},
    "revision": {"type": "str"},
    "api_key_file": {"type": "path", "no_log": False},
    "role": {"type": "str", "choices": ["prefill", "decode"]},
    "node_rank": {"type": "int", "default": 0},
    "members": {"type": "list", "elements": "str", "default": []},
    "hold": {"type": "bool", "default": False},
    "successes": {"type": "int", "default": 3},
    "timeout": {"type": "float", "default": 1800},
    "stall_timeout": {"type": "float", "default": 600},
    "hard_timeout": {"type": "float", "default": 7200},
    "health_timeout": {"type": "float", "default": 30},
    "generation_timeout": {"type": "float", "default": 600},
    "was_ready_before": {"type": "bool", "default": False},
    "tolerated_restarts": {"type": "int", "default": 0},
    "long_prompt_words": {"type": "int", "default": 600},
    "slice_seconds": {"type": "float", "default": 30},
    "carry": {"type": "dict"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    problem = usable(params)
    if problem:
        module.fail_json(msg=problem)
    try:
        key = observe.read_key(params["api_key_file"]) if params["api_key_file"] else None
    except ValueError as error:
        module.fail_json(msg=str(error))
    if key:
        module.no_log_values.add(key)
    look_once = params["mode"] == "verify" or module.check_mode
    options = Options(
        unit=None if params["foreground_pid"] else params["unit"] or f"sglang-{params['instance']}.service",
        foreground_pid=params["foreground_pid"],
        log_file=params["log_file"],
        host=params["host"],
        port=params["port"],
        health_timeout=max(25.0, params["health_timeout"]),
        generation_timeout=max(25.0, params["generation_timeout"]),
        long_prompt_words=params["long_prompt_words"],
    )
    settings = Settings(
        successes=params["successes"],
        timeout=params["timeout"],
        stall_timeout=params["stall_timeout"],
        hard_timeout=params["hard_timeout"],
        was_ready_before=params["was_ready_before"],
        tolerated_restarts=params["tolerated_restarts"],
        node_rank=params["node_rank"],
        role=params["role"],
        model=params["model"],
        expected_argv=params["expected_argv"],
        verify=look_once,
        hold=params["hold"] and not look_once,
    )
    target = observe.Target(
        observe.connect_host(params["host"]),
        params["port"],
        params["scheme"]
        or observe.scheme_of(
            params["expected_argv"] or observe.running_argv(options.unit, options.foreground_pid, run)
        ),
        key,
        params["verify_ca"],
        params["tls_server_name"],
    )
    result = run_slice(
        HostEyes(options, target, run, params["model"]),
        options,
        settings,
        params["carry"] or None,
        params["slice_seconds"],
        once=module.check_mode,
        secrets=observe.encode_secret_forms(key),
        redact_info=redact_server_info,
    )
    result.update(changed=False, revision=params["revision"])
    if result["slice"]["done"] and not result["ready"] and not look_once:
        module.fail_json(msg=failure_text(params["instance"], result), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
