#!/usr/bin/python
# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: router_worker
short_description: Take a worker out of SGLang's router until it is idle, or put it back
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - With O(state=drained), the router is told to send nothing more to the worker, then its running and queued requests
    are waited for. Requests that run are not cut off by the removal.
    A router that cannot be used is told before anything changes.
  - With O(state=present), the worker is added unless the router has it, the router must find it healthy, and where it
    was added, a request must be seen to arrive at it. Clients' requests are watched for first. When none comes within
    10 s, own ones of at most 128 tokens are sent through the router, at most as many at once
    as it has workers (and 16), until the worker has one.
  - Runs on the host of the worker, which must reach the router. Which API the router has is found out by asking it.
  - It is an action plugin that calls the module in slices and prints what still runs.
options:
  instance:
    description: Name of the instance, for the lines that are printed.
    type: str
    default: default
  router_url:
    description:
      - Base URL of the router, or of all routers in front of the worker. It is taken out of all before its requests are
        waited for.
    type: list
    elements: str
    required: true
  worker_url:
    description: URL by which the router reaches the worker.
    type: str
    required: true
  server_url:
    description: URL by which this host reaches the worker, to ask it for its load. By default O(worker_url).
    type: str
  state:
    description:
      - V(drained) takes the worker out and waits until it is idle.
      - V(present) puts it in and waits until the router finds it healthy.
    type: str
    choices: [drained, present]
    default: present
  worker:
    description: Further keys that the router is told, such as C(worker_type), C(bootstrap_port), C(priority).
    type: dict
    default: {}
  api_key:
    description: API key of the worker; the router needs it to forward requests.
    type: str
  router_api_key:
    description: API key of the router.
    type: str
  timeout:
    description:
      - Seconds to wait. With O(state=drained) the end of it is a warning, since the service's own stop gives requests
        some time, too. With O(state=present) it is a failure.
    type: float
    default: 300
  traffic_timeout:
    description:
      - With O(state=present), seconds until a request must arrive at a worker that was added; V(0) does not look.
      - The task fails when own requests were not served. It is a warning when they all went to other workers, which
        some policies do, and when it cannot be told, such as without a client's request while O(own_requests=false).
    type: float
    default: 60
  own_requests:
    description: Whether own requests may be sent when no client sends one.
    type: bool
    default: true
  allow_last:
    description:
      - With O(state=drained), whether the worker may be taken out although the router's other workers of its kind are
        all unhealthy. A worker that is the router's only one is always taken out, with a warning.
    type: bool
    default: false
  slice_seconds:
    description: Length of one slice. Set by the action plugin.
    type: float
    default: 20
  carry:
    description: State between the slices. Set by the action plugin.
    type: dict
    default: {}
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
  idempotent:
    support: full
"""

EXAMPLES = r"""
- name: Drain
  gpufleet.sglang.router_worker:
    router_url: http://router.example:30000
    worker_url: http://gpu-01.example:30000
    state: drained
    timeout: 600

- name: Put it back
  gpufleet.sglang.router_worker:
    router_url: http://router.example:30000
    worker_url: http://gpu-01.example:30000
    api_key: "{{ sglang_secrets.api_key }}"
    state: present
"""

RETURN = r"""
drained:
  description: Whether the router has the worker no more, and the worker was seen idle or does not tell its load.
  returned: for O(state=drained)
  type: bool
running:
  description: Requests that the worker still ran when it was last seen, null when it does not tell.
  returned: for O(state=drained)
  type: int
queued:
  description: Requests that still waited.
  returned: for O(state=drained)
  type: int
others:
  description: Workers that the router goes on with.
  returned: for O(state=drained)
  type: list
  elements: str
healthy:
  description: Whether the router has the worker and finds it healthy.
  returned: for O(state=present)
  type: bool
traffic:
  description: Whether a request arrived at the worker; null when it was not added, or was not looked for.
  returned: for O(state=present)
  type: dict
  contains:
    seen:
      description: Whether a request was seen.
      type: bool
    how:
      description:
        - V(router) when the router counts a request that this worker has, V(worker) when the worker runs one.
      type: str
    own_requests:
      description: Number of own requests that were sent.
      type: int
    seconds:
      description: How long it took.
      type: float
    reason:
      description: Why none was seen.
      returned: when none was seen
      type: str
"""

import functools
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils import _router


class _Clock:
    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "default": "default"},
            "router_url": {"type": "list", "elements": "str", "required": True},
            "worker_url": {"type": "str", "required": True},
            "server_url": {"type": "str"},
            "state": {"type": "str", "choices": ["drained", "present"], "default": "present"},
            "worker": {"type": "dict", "default": {}},
            "api_key": {"type": "str", "no_log": True},
            "router_api_key": {"type": "str", "no_log": True},
            "timeout": {"type": "float", "default": 300},
            "traffic_timeout": {"type": "float", "default": 60},
            "own_requests": {"type": "bool", "default": True},
            "allow_last": {"type": "bool", "default": False},
            "slice_seconds": {"type": "float", "default": 20},
            "carry": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    params = module.params
    for name in ("router_url", "worker_url", "server_url"):
        for url in params[name] if name == "router_url" else [params[name] or "http://"]:
            if not url.startswith(("http://", "https://")):
                module.fail_json(msg=f"{name}: {url!r} is no URL; it begins with http:// or https://")
    worker = {**params["worker"], "url": params["worker_url"].rstrip("/")}
    if params["api_key"]:
        worker["api_key"] = params["api_key"]
    server = (params["server_url"] or params["worker_url"]).rstrip("/")
    limits = [params[name] for name in ("timeout", "traffic_timeout", "own_requests", "allow_last")]
    wanted = _router.Wanted(worker, server, params["api_key"], *limits)
    key = params["router_api_key"]
    routers = [_router.Router(url, _router.http_request, key) for url in dict.fromkeys(params["router_url"])]
    # The certificate names the service, and this host asks itself.
    local = functools.partial(_router.http_request, verify=False)
    rest = (_Clock, params["carry"], params["slice_seconds"], module.check_mode)
    try:
        if params["state"] == "drained":
            result = _router.drain(routers, wanted, local, *rest)
        else:
            result = _router.join(routers, wanted, local, _router.Background, *rest)
    except _router.RouterError as error:
        module.fail_json(msg=str(error))
    for warning in result.pop("warnings", []) if result.get("slice", {}).get("done") else []:
        module.warn(warning)
    result.pop("warnings", None)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
