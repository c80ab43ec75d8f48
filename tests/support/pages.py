"""The pages of the documentation, and what they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from string import Template

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
ENDS = ";|&\n"
"""Characters that end a command."""


def blocks(page: Path, language: str = "sh") -> list[str]:
    """The fenced blocks of a language: `sh` has the commands that a reader is to run."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for of, block in fenced if of == language]


def printed(page: Path, mark: str) -> list[str]:
    """The lines that a page shows between two marks."""
    shown = page.read_text().partition(f"<!-- {mark} -->")[2].partition(f"<!-- /{mark} -->")[0]
    return shown.strip().strip("`").strip("\n").splitlines()


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of a page, with the variables that its block exports."""
    for block in blocks(page):
        exported: dict[str, str] = {}
        lexer = shlex.shlex(block.replace("\\\n", " "), posix=True, punctuation_chars=ENDS)
        lexer.whitespace, lexer.whitespace_split = " \t", True
        command: list[str] = []
        for word in [*lexer, "\n"]:
            if word.strip(ENDS):
                command.append(Template(word).safe_substitute(exported))
                continue
            if command[:1] == ["export"]:
                exported.update(each.split("=", 1) for each in command[1:])
            elif command:
                yield command
            command = []


def options(command: list[str], name: str) -> list[str]:
    """The values of an option, as many as are given."""
    apart = [value for word, value in pairwise(command) if word == name]
    return apart + [word.split("=", 1)[1] for word in command if word.startswith(f"{name}=")]
