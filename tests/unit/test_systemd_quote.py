# Copyright: the gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""systemd's quoting, both ways, and the filter."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpufleet.sglang.plugins.filter.systemd_quote import FilterModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd_quote import (
    QuoteError,
    format_environment_file,
    parse_command,
    parse_environment_file,
    quote_argument,
    quote_command,
    split_words,
)
from hypothesis import given
from hypothesis import strategies as st

filter_quote = FilterModule().filters()["systemd_quote"]


def carried(char: str) -> bool:
    code = ord(char)
    return not (char in "\0\n\r" or 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE)


texts = st.text(st.characters(), max_size=40).filter(lambda text: all(carried(char) for char in text))


@given(st.lists(texts, max_size=8))
def test_any_argv_reads_back(arguments: list[str]) -> None:
    argv = ["/usr/bin/python3", *arguments]
    hostile = dict.fromkeys(("A", "HOME", "x", "PATH"), "EXPANDED")
    specifiers = dict.fromkeys("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "EXPANDED")
    assert parse_command(quote_command(argv), hostile, specifiers) == argv
    assert parse_command(quote_command(argv, " \\\n  ").replace("\\\n", " "), hostile, specifiers) == argv


@given(texts)
def test_quoted_text_stays_on_one_line_and_one_word(text: str) -> None:
    quoted = quote_argument(text)
    assert not any(ord(char) < 0x20 for char in quoted)
    assert len(split_words(quoted)) == 1


@given(st.dictionaries(st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,8}\Z"), texts, max_size=6))
def test_any_environment_reads_back(env: dict[str, str]) -> None:
    assert parse_environment_file(format_environment_file(env)) == env


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("plain-1.2/x:y=z", "plain-1.2/x:y=z"),
        ("100%", '"100%%"'),
        ("$HOME", '"$$HOME"'),
        ('{"a": "b\\n"}', '"{\\"a\\": \\"b\\\\n\\"}"'),
        ("", '""'),
        (";", '";"'),
        ("\t", '"\\x09"'),
    ],
)
def test_quoting_as_systemd_wants_it(value: str, quoted: str) -> None:
    assert quote_argument(value) == quoted


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "\ud800", "\ufdd0", "\U0001ffff", "x" * 131072])
def test_what_cannot_be_carried_is_refused(value: str) -> None:
    with pytest.raises(QuoteError):
        quote_argument(value)


@pytest.mark.parametrize(
    "program", ["python3", "/usr/bin/py thon\t", '/opt/"x"', "/opt/a\\b", "/opt/../x", "/opt//x", "/x/"]
)
def test_programs_that_systemd_refuses(program: str) -> None:
    with pytest.raises(QuoteError):
        quote_command([program])


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("/bin/echo $ONE $TWO ${TWO}", ["/bin/echo", "one", "two", "two", "two two"]),
        ("-@/bin/echo name 'a b' \"c\\x20d\" \\u00e9 %i $$x", ["/bin/echo", "a b", "c d", "é", "inst", "$x"]),
        (":/bin/echo $ONE ${ONE}", ["/bin/echo", "$ONE", "${ONE}"]),
        ("/bin/echo ${UNSET} x%%", ["/bin/echo", "", "x%"]),
    ],
)
def test_lines_written_by_hand(line: str, argv: list[str]) -> None:
    assert parse_command(line, {"ONE": "one", "TWO": "two two"}, {"i": "inst"}) == argv


@pytest.mark.parametrize("line", ["/bin/x 'open", "/bin/x a ; /bin/y", "/bin/x \\q", "", "/bin/x \\x00"])
def test_bad_lines_are_refused(line: str) -> None:
    with pytest.raises(QuoteError):
        parse_command(line)


def test_environment_file_written_by_hand() -> None:
    text = (
        '# comment \\\ncontinued\n;other\n\nA = unquoted value \nB=\'single \\n $x\'\nC="a \\"b\\" \\q \\\njoined"\n'
        "D=x\\ y\\\nz\nnonsense\nE='a'\"b\"\n1BAD=x\nF=\n"
    )
    assert parse_environment_file(text) == {
        "A": "unquoted value",
        "B": "single \\n $x",
        "C": 'a "b" \\q joined',
        "D": "x yz",
        "E": "ab",
        "F": "",
    }


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_itself_takes_the_line(tmp_path: Path) -> None:
    arguments = [chr(code) for code in range(1, 256) if chr(code) not in "\n\r"] + ["%s", "${A}", "\\", "😀"]
    unit = tmp_path / "quote-test.service"
    unit.write_text(f"[Service]\nExecStart={quote_command(['/bin/true', *arguments])}\n", encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_filter() -> None:
    assert filter_quote("a b") == '"a b"'
    assert filter_quote(["/bin/x", "100%"]) == '/bin/x "100%%"'
    for bad in (3, ["/bin/x", 3], "a\nb", []):
        with pytest.raises(AnsibleFilterError, match=r"gpufleet\.sglang\.systemd_quote"):
            filter_quote(bad)
