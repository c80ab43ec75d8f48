"""`ecd` and `ecd-cli` as their help describes them: the page of commands, and man pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from typer import Typer
from typer.core import TyperGroup
from typer.main import get_command

from ecd.settings.config import ENV_PREFIX


class Option(NamedTuple):
    names: list[str]
    default: str
    meaning: str


class Command(NamedTuple):
    name: str
    usage: str
    help: str
    options: list[Option]
    takes_settings: bool
    """Each setting is an option as well, which is in no list."""


def described(name: str, app: Typer) -> Iterator[Command]:
    """The program, and its commands."""
    yield from _described(name, get_command(app))


def _described(name: str, command: Any) -> Iterator[Command]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    settings = [each for each in command.params if f"({ENV_PREFIX}" in (each.help or "")]
    unsaid = [each for each in command.params if each.hidden or "completion" in each.name]
    options = [
        Option(each.opts, _shown(each.default), each.help or "")
        for each in command.params
        if each not in (*arguments, *settings, *unsaid)
    ]
    usage = " ".join((name, *map(_word, arguments)))
    yield Command(name, usage, command.help.strip(), options, bool(settings))
    if isinstance(command, TyperGroup):
        for each in command.commands.values():
            yield from _described(f"{name} {each.name}", each)


def _word(argument: Any) -> str:
    word = (argument.metavar or argument.name).strip("{}[].").upper()
    word = word if argument.required else f"[{word}]"
    return f"{word}..." if argument.nargs == -1 else word


def _shown(default: Any) -> str:
    value = default.value if isinstance(default, Enum) else default
    return "" if value in (None, False, "") else str(value)


def man_page(name: str, app: Typer, also: str, variables: Iterable[tuple[str, str, str]]) -> str:
    """A page in the macros of man(7). `variables`: each with its default and its meaning."""
    program, *commands = described(name, app)
    summary, _, rest = program.help.removeprefix(f"`{name}`: ").partition(".")
    lines = [
        '.\\" Written by docs/reference.py.',
        f'.TH {name.upper()} 1 "" "" ecd',
        ".SH NAME",
        f"{name} \\- {summary[0].lower()}{summary[1:]}",
        ".SH SYNOPSIS",
        f".B {name}",
        "[\\fIoption\\fR]... \\fIcommand\\fR [\\fIargument\\fR]...",
        ".SH DESCRIPTION",
        *_text(rest.strip()),
        ".SH OPTIONS",
        *_options(program),
        ".SH COMMANDS",
    ]
    for each in commands:
        lines += [f".SS {_plain(each.usage)}", *_text(each.help), *_options(each)]
    lines.append(".SH ENVIRONMENT")
    for variable, default, meaning in variables:
        lines += [".TP", f".B {variable}", *_text(meaning)]
        lines += _text(f"Default: {default}.") if default else ()
    return "\n".join((*lines, ".SH SEE ALSO", f".BR {also} (1)", ""))


def _options(command: Command) -> Iterator[str]:
    for option in command.options:
        yield from (".TP", f".B {_plain(', '.join(option.names))}", *_text(option.meaning))
        if option.default:
            yield from _text(f"Default: {option.default}.")
    if command.takes_settings:
        yield ".PP"
        yield from _text("Each setting but the token is an option, too: `--lease-ttl-s 30s`.")


def _text(text: str) -> list[str]:
    """Paragraphs, in which backticks make words bold."""
    lines = re.sub(r"`([^`]*)`", r"\\fB\1\\fR", _plain(text)).splitlines()
    return [line or ".PP" for line in lines]


def _plain(text: str) -> str:
    """Text without a character that troff takes for its own."""
    return re.sub(r"^(?=[.'])", r"\\&", text.replace("\\", "\\e").replace("-", "\\-"), flags=re.M)
