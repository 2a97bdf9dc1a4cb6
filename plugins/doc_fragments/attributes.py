# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Attributes that every module of the collection documents."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in check_mode and return changed status prediction without modifying target.
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
  idempotent:
    description: When run twice in a row outside check mode, with the same arguments, the second run changes nothing.
  action_group:
    description: Use C(group/gpufleet.sglang.all) in C(module_defaults) to set defaults for this module.
    support: full
    membership:
      - gpufleet.sglang.all
"""

    INFO = r"""
options: {}
attributes:
  check_mode:
    support: full
    description: This only reads, so it does the same in check mode.
  diff_mode:
    support: N/A
    description: This changes nothing.
  idempotent:
    support: full
    description: This changes nothing.
"""
