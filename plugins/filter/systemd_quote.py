# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter gpufleet.sglang.systemd_quote."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd_quote import (
    QuoteError,
    quote_argument,
    quote_command,
)


def systemd_quote(value: Any) -> str:
    """A string becomes one quoted argument, a list a whole command whose first item is the program's path."""
    try:
        if isinstance(value, str):
            return quote_argument(str(value))
        if isinstance(value, (list, tuple)):
            for item in value:
                if not isinstance(item, str):
                    raise AnsibleFilterError(
                        f"gpufleet.sglang.systemd_quote: every argument must be a string, not {item!r}; use | string"
                    )
            return quote_command([str(item) for item in value])
    except QuoteError as error:
        raise AnsibleFilterError(f"gpufleet.sglang.systemd_quote: {error}") from error
    raise AnsibleFilterError(f"gpufleet.sglang.systemd_quote takes a string or a list of strings, not {value!r}")


class FilterModule:
    """Filters of the collection."""

    def filters(self) -> dict:
        return {"systemd_quote": systemd_quote}
