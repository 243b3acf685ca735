"""Where each key of a TOML text stands, which the standard library's parser does not tell."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable

Positions = dict[tuple[str, ...], tuple[int, int]]

# A text that is known to be TOML needs to be taken apart only this far.
TOKEN = re.compile(
    r"""
      (?P<string>\"\"\"(?:\\.|[^\\])*?\"\"\"\"{0,2} | '''.*?''''{0,2}
        | "(?:\\.|[^"\\\n])*" | '[^'\n]*')
    | (?P<comment>\#[^\n]*)
    | (?P<newline>\n)
    | (?P<mark>[\[\]{},=.])
    | (?P<bare>[A-Za-z0-9_+-]+)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)


def locate(text: str, unquote: Callable[[str], str]) -> Positions:
    """Line and column, from 1, of each key, by the keys that lead to it.

    Args:
        text: A text that is known to be TOML.
        unquote: What a quoted text with escapes stands for.
    """
    return Locator(text, unquote).positions


class Locator:
    """Goes through a text once, key by key."""

    def __init__(self, text: str, unquote: Callable[[str], str]) -> None:
        self.positions: Positions = {}
        self._unquote = unquote
        self._lines = [0, *(found.end() for found in re.finditer("\n", text))]
        self._tokens = [
            (each.lastgroup or "", each.group(), each.start())
            for each in TOKEN.finditer(text)
            if (each.lastgroup != "comment" and not each.group().isspace()) or each.group() == "\n"
        ]
        self._at = 0
        table: tuple[str, ...] = ()
        while self._at < len(self._tokens):
            kind, word, _ = self._tokens[self._at]
            if kind == "newline":
                self._at += 1
            elif word == "[":
                while self._word() == "[":
                    self._at += 1
                table = self._key(())
                while self._word() == "]":
                    self._at += 1
            else:
                self._pair(table)

    def _word(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _pair(self, table: tuple[str, ...]) -> None:
        """`key = value`."""
        keys = self._key(table)
        self._at += 1  # the equals sign
        self._value(keys)

    def _key(self, table: tuple[str, ...]) -> tuple[str, ...]:
        """A dotted key; each part of it is noted where it is met first."""
        keys = table
        while self._at < len(self._tokens):
            kind, word, start = self._tokens[self._at]
            if kind in ("bare", "string"):
                has_escapes = word.startswith('"') and "\\" in word
                plain = word[1:-1] if kind == "string" else word
                keys = (*keys, self._unquote(word) if has_escapes else plain)
                self.positions.setdefault(keys, self._place(start))
            elif word != ".":
                break
            self._at += 1
        return keys

    def _value(self, keys: tuple[str, ...]) -> None:
        """Goes past a value; the keys of an inline table are noted."""
        depth = 0
        while self._at < len(self._tokens):
            word = self._word()
            if depth == 0 and word in ("\n", ",", "}", "]"):
                return
            self._at += 1
            if word == "{":
                while self._word() not in ("}", ""):
                    if self._word() in (",", "\n"):
                        self._at += 1
                    else:
                        self._pair(keys)
                self._at += 1
            elif word in ("[", "]"):
                depth += 1 if word == "[" else -1

    def _place(self, start: int) -> tuple[int, int]:
        line = bisect_right(self._lines, start)
        return line, start - self._lines[line - 1] + 1
