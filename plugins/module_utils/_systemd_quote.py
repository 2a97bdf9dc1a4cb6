# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Private to this collection: systemd's own quoting (it is not a shell's), both ways."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+-]+\Z")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SIMPLE_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    '"': '"',
    "'": "'",
    "s": " ",
}
# The kernel's MAX_ARG_STRLEN (32 pages), with its final NUL.
MAX_ARGUMENT_BYTES = 131071
# systemd drops a logical line longer than this (LONG_LINE_MAX).
MAX_LINE_BYTES = 1024 * 1024 - 1


class QuoteError(ValueError):
    """A value that cannot be given to systemd; the message says which and why."""


def _check_text(value: str, what: str) -> None:
    if "\0" in value:
        raise QuoteError(f"{what} contains a NUL byte, which no process argument or variable can hold")
    if "\n" in value or "\r" in value:
        raise QuoteError(f"{what} contains a line break; write it on one line: {value[:60]!r}")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise QuoteError(f"{what} is not valid UTF-8 text: {value[:60]!r}") from None
    if any(0xFDD0 <= ord(char) <= 0xFDEF or (ord(char) & 0xFFFE) == 0xFFFE for char in value):
        # Escaped they start, but then D-Bus refuses every property of the unit and systemctl cannot even show it.
        raise QuoteError(f"{what} contains a Unicode noncharacter, which systemd cannot handle: {value[:60]!r}")
    if size > MAX_ARGUMENT_BYTES:
        raise QuoteError(f"{what} has {size} bytes; the kernel takes at most {MAX_ARGUMENT_BYTES}")


def _needs_byte_escape(char: str) -> bool:
    code = ord(char)
    return code < 0x20 or 0x7F <= code < 0xA0 or code == 0xFEFF


def quote_argument(value: str) -> str:
    """One argument of an Exec line so that systemd passes exactly ``value``; raises QuoteError."""
    _check_text(value, "argument")
    if _PLAIN.match(value):
        return value
    out = []
    for char in value:
        if char in '"\\':
            out.append("\\" + char)
        elif char in "%$":
            out.append(char * 2)
        elif _needs_byte_escape(char):
            out.extend(f"\\x{byte:02x}" for byte in char.encode("utf-8"))
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


def check_program(path: str) -> None:
    """Raise QuoteError when systemd would not take ``path`` as the program of an Exec line."""
    _check_text(path, "the program")
    if not path.startswith("/"):
        raise QuoteError(f"the program must be an absolute path, not {path!r}")
    if any(char in "\"'\\$" or _needs_byte_escape(char) for char in path):
        raise QuoteError(f"systemd takes no quotes, backslashes, dollar or control characters in a program: {path!r}")
    if "//" in path or path.endswith("/") or any(part in (".", "..") for part in path.split("/")):
        raise QuoteError(f"the program's path must be a plain one, without '//', '.' or '..': {path!r}")


def quote_command(argv: Sequence[str], separator: str = " ") -> str:
    """A whole command for ``ExecStart=``; ``separator`` may be a line continuation. Raises QuoteError."""
    if not argv:
        raise QuoteError("the command is empty")
    check_program(argv[0])
    text = separator.join(quote_argument(item) for item in argv)
    if len(text.encode("utf-8")) > MAX_LINE_BYTES - 64:
        raise QuoteError("the command is longer than systemd reads in one line (1 MiB)")
    return text


def quote_setting(value: str) -> str:
    """One item of a list setting outside Exec lines (``Environment=``, ``ReadOnlyPaths=``): ``$`` stays as it is."""
    _check_text(value, "value")
    if _PLAIN.match(value):
        return value
    return quote_argument(value).replace("$$", "$")


def specifier_escape(value: str) -> str:
    """A setting that systemd takes whole (``Description=``, ``WorkingDirectory=``), with ``%`` made literal."""
    _check_text(value, "value")
    return value.replace("%", "%%")


def _unescape(text: str, index: int) -> tuple[bytes, int]:
    """The bytes of the escape at ``text[index]`` (just after the backslash) and the index after it."""
    char = text[index : index + 1]
    if char in _SIMPLE_ESCAPES and char:
        return _SIMPLE_ESCAPES[char].encode(), index + 1
    for pattern, base, wide in (
        (r"x([0-9a-fA-F]{2})", 16, False),
        (r"u([0-9a-fA-F]{4})", 16, True),
        (r"U([0-9a-fA-F]{8})", 16, True),
        (r"([0-3][0-7]{2})", 8, False),
    ):
        match = re.compile(pattern).match(text, index)
        if match:
            number = int(match.group(1), base)
            if number == 0:
                break
            return (chr(number).encode("utf-8") if wide else bytes([number])), match.end()
    raise QuoteError(f"unknown escape sequence \\{char} in {text[:60]!r}")


def split_words(text: str) -> list[tuple[str, bool]]:
    """Words of a setting as systemd splits them: ``[(word, was quoted)]``; raises QuoteError on bad quoting."""
    words: list[tuple[str, bool]] = []
    index, length = 0, len(text)
    while True:
        while index < length and text[index] in " \t\n\r":
            index += 1
        if index >= length:
            return words
        out = bytearray()
        quote: str | None = None
        quoted = False
        while index < length:
            char = text[index]
            if char == "\\":
                data, index = _unescape(text, index + 1)
                out += data
                continue
            if quote:
                if char == quote:
                    quote = None
                else:
                    out += char.encode("utf-8")
            elif char in "\"'":
                quote, quoted = char, True
            elif char in " \t\n\r":
                break
            else:
                out += char.encode("utf-8")
            index += 1
        if quote:
            raise QuoteError(f"unbalanced quotes in {text[:60]!r}")
        words.append((out.decode("utf-8", "surrogateescape"), quoted))


def _expand_specifiers(word: str, specifiers: dict[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "%":
            return "%"
        return specifiers.get(name, match.group(0))

    return re.sub(r"%(.)", one, word)


def _expand_variables(word: str, env: dict[str, str]) -> list[str]:
    whole = re.match(r"\$([A-Za-z_][A-Za-z0-9_]*)\Z", word)
    if whole:
        return env.get(whole.group(1), "").split()

    def one(match: re.Match[str]) -> str:
        return "$" if match.group(0) == "$$" else env.get(match.group(1), "")

    return [re.sub(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)\}", one, word)]


def parse_command(text: str, env: dict[str, str] | None = None, specifiers: dict[str, str] | None = None) -> list[str]:
    """The argv that systemd makes of the value of an Exec line; raises QuoteError.

    ``env`` is what ``$NAME`` sees, ``specifiers`` what ``%x`` sees (unknown ones stay as written). The prefixes
    ``@ - : + !`` of the program are removed. Several commands in one line (``;``) are refused.
    """
    words = split_words(text)
    if not words:
        raise QuoteError("the command is empty")
    if any(word == ";" and not quoted for word, quoted in words):
        raise QuoteError("several commands in one line")
    program = words[0][0].lstrip("-@:+!")
    prefixes = words[0][0][: len(words[0][0]) - len(program)]
    argv = [_expand_specifiers(program, specifiers or {})]
    for word, _quoted in words[2 if "@" in prefixes else 1 :]:
        expanded = _expand_specifiers(word, specifiers or {})
        argv.extend([expanded] if ":" in prefixes else _expand_variables(expanded, env or {}))
    return argv


def check_environment(env: dict[str, str]) -> None:
    """Raise QuoteError for a name or value that an EnvironmentFile cannot carry unchanged."""
    for name, value in env.items():
        if not _ENV_NAME.match(name):
            raise QuoteError(f"environment variable name {name!r} is not valid (letters, digits and _)")
        _check_text(value, f"environment variable {name}")


def format_environment_file(env: dict[str, str]) -> str:
    """The text of an ``EnvironmentFile=`` that gives exactly ``env``, sorted by name; raises QuoteError."""
    check_environment(env)
    lines = []
    for name in sorted(env):
        value = re.sub(r'(["\\`$])', r"\\\1", env[name])
        lines.append(f'{name}="{value}"\n')
    return "".join(lines)


def parse_environment_file(text: str) -> dict[str, str]:
    """What systemd reads from an ``EnvironmentFile=`` (quotes, escapes, continuation lines, comments)."""
    env: dict[str, str] = {}
    index, length = 0, len(text)
    while index < length:
        while index < length and text[index] in " \t\r\n":
            index += 1
        if index >= length:
            break
        if text[index] in "#;":
            while index < length and text[index] != "\n":
                index += 2 if text[index] == "\\" else 1
            continue
        end = index
        while end < length and text[end] not in "=\n":
            end += 1
        name = text[index:end].strip(" \t\r")
        if end >= length or text[end] == "\n":
            index = end
            continue
        value, index = _environment_value(text, end + 1)
        if _ENV_NAME.match(name):
            env[name] = value
    return env


def _environment_value(text: str, index: int) -> tuple[str, int]:
    out: list[str] = []
    keep = 0  # length of out that trailing-blank removal must not cut
    length = len(text)
    at_start = True
    while index < length and text[index] != "\n":
        char = text[index]
        if at_start and char in " \t\r":
            index += 1
            continue
        if at_start and char in "\"'":
            end = index + 1
            while end < length and text[end] != char:
                if char == '"' and text[end] == "\\" and end + 1 < length:
                    following = text[end + 1]
                    if following in '"\\`$':
                        out.append(following)
                    elif following != "\n":
                        out.append("\\" + following)
                    end += 2
                    continue
                out.append(text[end])
                end += 1
            keep = len(out)
            index = end + 1
            continue
        at_start = False
        if char == "\\" and index + 1 < length:
            if text[index + 1] != "\n":
                out.append(text[index + 1])
                keep = len(out)
            index += 2
            continue
        out.append(char)
        if char not in " \t\r":
            keep = len(out)
        index += 1
    return "".join(out[:keep]), index
