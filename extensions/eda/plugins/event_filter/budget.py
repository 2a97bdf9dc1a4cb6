# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides which hosts of an event may be remediated now: a cool-down a host and a cap on hosts a day.

DOCUMENTATION:
  Takes the event of a webhook, from Alertmanager (payload.alerts) or plain
  (payload: {event: readiness_failed, host: gpu-01}), and adds
    sglang.hosts  hosts that may be remediated now, also as meta.hosts, which limits run_playbook
    sglang.limit  the same as a word for --limit
    sglang.held   what was held back and why, as text; empty when nothing was
  The decision is kept in a file, so that a restart forgets nothing. When the file cannot be read or written, nothing
  is allowed. A host counts from the moment that it is let through, whatever becomes of its run.
ARGUMENTS:
  events            events that count, by name or by alertname
  cooldown_minutes  minutes in which a host is not let through again (60)
  hosts_per_day     hosts let through within 24 hours (5)
  host_label        label of an alert that names the host; a port is cut off (instance)
  host_pattern      regular expression that a host's whole name must match
  state_file        by default gpufleet-sglang/events.json in $XDG_STATE_HOME or ~/.local/state
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time

DAY = 24 * 3600
# What a limit would take for a group or a pattern, and not for one host.
NOT_HOSTS = ("all", "ungrouped", "localhost", "sglang", "sglang_rollout")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z")


def named_hosts(payload, events, host_label):
    """Return the hosts that an event names, in order, without repetition."""
    found = []
    if not isinstance(payload, dict):
        return found
    alerts = payload.get("alerts")
    for alert in alerts if isinstance(alerts, list) else []:
        labels = alert.get("labels") if isinstance(alert, dict) else None
        if not isinstance(labels, dict) or alert.get("status") != "firing" or labels.get("alertname") not in events:
            continue
        found.append(re.sub(r":\d+\Z", "", str(labels.get(host_label, ""))))
    if payload.get("event") in events:
        found.append(str(payload.get("host", "")))
    return list(dict.fromkeys(found))


def judge(hosts, runs, now, cooldown, cap, pattern):
    """Return (allowed, held): hosts that may run now, and ``{host: reason}``. ``runs`` is [[time, host], …]."""
    allowed, held = [], {}
    last = {host: at for at, host in sorted(tuple(run) for run in runs)}
    today = {host for at, host in runs if now - at < DAY}
    for host in hosts:
        if not NAME.match(host) or host in NOT_HOSTS or not re.fullmatch(pattern, host):
            held[host[:80]] = "not the name of a host of this fleet"
        elif host in last and now - last[host] < cooldown:
            held[host] = f"remediated {int((now - last[host]) // 60)} min ago, cool-down is {int(cooldown // 60)} min"
        elif host not in today and len(today) >= cap:
            held[host] = f"{len(today)} hosts within 24 h, the cap is {cap}"
        else:
            allowed.append(host)
            last[host] = now
            today.add(host)
    return allowed, held


def decide(hosts, path, now, cooldown, cap, pattern):
    """Judge and remember under a lock; fails closed."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(path + ".lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            runs = []
            if os.path.exists(path):
                with open(path, encoding="utf-8") as handle:
                    runs = [[float(at), str(host)] for at, host in json.load(handle)["runs"]]
            allowed, held = judge(hosts, runs, now, cooldown, cap, pattern)
            if allowed:
                # What still counts for the cap or a cool-down longer than a day.
                kept = [run for run in runs if now - run[0] < max(DAY, cooldown)] + [[now, host] for host in allowed]
                with open(path + ".part", "w", encoding="utf-8") as handle:
                    json.dump({"runs": kept}, handle)
                    handle.flush()
                    os.fsync(handle.fileno())
                os.replace(path + ".part", path)
            return allowed, held
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [], dict.fromkeys((host[:80] for host in hosts), f"the record of runs {path} is not usable: {error}")


def default_state():
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(base, "gpufleet-sglang", "events.json")


def main(
    event,
    events=(),
    cooldown_minutes=60,
    hosts_per_day=5,
    host_label="instance",
    host_pattern=".*",
    state_file=None,
):
    hosts = named_hosts(event.get("payload"), tuple(events), host_label)
    allowed, held = [], {}
    if hosts:
        path = os.path.expanduser(state_file) if state_file else default_state()
        allowed, held = decide(hosts, path, time.time(), float(cooldown_minutes) * 60, int(hosts_per_day), host_pattern)
    # Whatever the sender put there does not count.
    meta = {key: value for key, value in (event.get("meta") or {}).items() if key != "hosts"}
    if allowed:
        meta["hosts"] = allowed
    event["meta"] = meta
    event["sglang"] = {
        "hosts": allowed,
        "limit": ",".join(allowed),
        "held": "; ".join(f"{host}: {reason}" for host, reason in held.items()),
    }
    return event
