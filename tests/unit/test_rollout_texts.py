# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a large rollout says to a person who has ten seconds."""

from __future__ import annotations

from ansible_collections.gpufleet.sglang.plugins.module_utils import _rollout

SIZES = [1, *[25] * 39, 24]
ORDER = [f"gpu-{number:04}" for number in range(1, 1001)]
FLEET = {
    "order": ORDER,
    "serial": SIZES,
    "waves": [[{"instance": "default"}] for _size in SIZES],
    "skipped": [{"host": f"old-{number}", "reason": "plan refused: gpu_absent"} for number in range(14)],
}


def facts(began, state, text=""):
    return {"rollout_stage": "proven", "wave_began": began, "rollout_outcome": {"state": state, "text": text}}


def wave(number):
    first = sum(SIZES[:number])
    return ORDER[first : first + SIZES[number]]


def behind(*waves):
    """Facts of the hosts of some waves: ``(state, seconds that the wave took)`` each; and when they were over."""
    hostvars, clock = {host: {} for host in ORDER}, 1000.0
    for number, (state, took) in enumerate(waves):
        hostvars.update({host: facts(clock, state) for host in wave(number)})
        clock += took
    return hostvars, clock


def test_the_estimate_is_of_waves_that_changed_something():
    hostvars, clock = behind(*[("unchanged", 20)] * 7, ("done", 300), ("done", 900), ("done", 310))
    text = _rollout.wave_text(FLEET, wave(10)[0], 1000.0, clock, hostvars)
    assert "226 of 1000 hosts (75 done, 151 as it should be)" in text
    assert "about 2:40:10 to go" in text, "31 waves of the median, 310 s"
    hostvars, clock = behind(("unchanged", 20))
    assert "cannot be estimated" in _rollout.wave_text(FLEET, wave(1)[0], 1000.0, clock, hostvars)


def test_an_estimate_of_a_change_survives_facts_that_are_as_text():
    hostvars, clock = behind(("done", 60))
    hostvars[ORDER[0]]["wave_began"] = "1000.0"
    assert "about 40:00 to go" in _rollout.wave_text(FLEET, wave(1)[0], 1000.0, clock, hostvars)


def test_what_is_broken_where_why_and_what_next_come_first():
    hostvars, clock = behind(*[("unchanged", 20)] * 7, *[("done", 300)] * 10)
    broken = wave(17)
    for number, host in enumerate(broken):
        hostvars[host] = facts(clock, "went_back", f"Wait until it serves: dead after {number} s on {host}")
    hostvars[broken[3]] = facts(clock, "went_back", f"Check: {broken[7]}, a member of instance big, failed")
    hostvars[broken[4]] = facts(clock, "went_back", "Mend: pip failed")
    hostvars[broken[5]] = facts(clock, "down", "Wait: dead; going back failed, too: dead")
    lines = _rollout.rollout_text(FLEET, hostvars, 3600.0).splitlines()
    assert lines[0] == "Rollout STOPPED in wave 18 of 41 after 1:00:00"
    assert lines[1] == f"  1 DOWN, could not go back: {broken[5]}"
    assert lines[3].startswith("  24 FAILED, serves its last good revision: gpu-0402, ")
    assert lines[3].endswith(" and 4 more")
    assert lines[4].startswith("    22 hosts (gpu-0402, gpu-0403, gpu-0404 and 19 more), such as gpu-0402: Wait until")
    assert lines[5] == f"    {broken[4]}: Mend: pip failed"
    assert lines[6].startswith(f"    {broken[3]}: ") and "a member of" in lines[6], "a consequence is told last"
    assert lines[7].startswith("Next: nothing serves where it is DOWN") and f"--limit {broken[5]}" in lines[7]
    assert lines[8].startswith("  250 done: ") and lines[9].startswith("  151 as it should be: ")
    assert lines[10].startswith("  574 untouched: gpu-0427, ") and lines[10].endswith(" and 564 more")
    assert lines[11].startswith("  14 left out: old-0, ")
    assert lines[12] == "    14 hosts (old-0, old-1, old-2 and 11 more): plan refused: gpu_absent"
    assert len(lines) == 13 and max(map(len, lines)) < 320


def test_many_causes_are_cut_and_counted():
    fleet = {"order": list("abcdefg"), "serial": [7], "waves": [[]]}
    hostvars = {host: facts(0, "failed", f"Task {host * 3}: x") for host in fleet["order"]}
    for host in fleet["order"]:
        hostvars[host]["rollout_outcome"]["text"] = "Task " + "xyzuvwq"["abcdefg".index(host)]
    text = _rollout.rollout_text(fleet, hostvars)
    assert text.startswith("Rollout FAILED\n  7 FAILED: a, b, c, d, e, f, g\n    a: Task x\n")
    assert "    and 2 more causes on 2 hosts, see the report" in text


def test_a_complete_rollout_says_without_whom():
    hostvars = {host: facts(0, "done") for host in ORDER}
    text = _rollout.rollout_text(FLEET, hostvars, 60.0)
    assert (
        text.startswith("Rollout complete after 1:00, without 14 hosts\n  1000 done: gpu-0001, ") and "Next" not in text
    )
