"""The options, consoles and exit codes that all commands share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from ecd_client.cli import render
from ecd_client.errors import EcdError
from ecd_client.session.channel import call, open_channel, resolve
from ecd_proto import tables
from ecd_proto.contract import seconds_of
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

FAILED, USAGE, UNREACHABLE = 1, 2, 3
DEFAULT_NAMESPACE = "default"
OTHER_NAMESPACES = (
    "It may be in another one (--namespace): ecd-cli namespaces, on a node that has it, lists them."
)
"""Advice where no node has a key in a namespace that the user has not named."""

out = tables.console()
errors = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)

COMPLETION_S = 0.5
"""How long a shell waits for the daemon to complete a word."""


def known_namespaces(context: typer.Context, incomplete: str) -> list[str]:
    """Namespaces for a shell to complete, as tables show them: whole ones have bars and blanks."""
    try:
        address = resolve(context.find_root().params.get("address"))
        stub = pb_grpc.CacheStub(open_channel(address))
        status = call(stub.Status, pb.StatusRequest(), address, COMPLETION_S)
    except EcdError:
        return []
    known = {each.namespace for each in status.namespaces}
    known |= {each.namespace for each in status.traffic}
    shown = {render.short_namespace(name) for name in known}
    names = (name for name in shown if name.startswith(incomplete) and name == shlex.quote(name))
    return sorted(names)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Namespace = Annotated[
    str | None,
    typer.Option(
        *("--namespace", "-n"),
        help="The key's namespace, whole or as tables show it.",
        autocompletion=known_namespaces,
    ),
]
MmHash = Annotated[
    str,
    typer.Argument(
        metavar="KEY",
        help="The item's mm_hash: whole, as tables show it, or 6 or more first digits of a digest.",
    ),
]


@dataclass
class Options:
    """The options before the command's name, and calls to the daemon that they choose."""

    address: str
    as_json: bool

    def stub(self) -> Any:
        return pb_grpc.CacheStub(open_channel(self.address))

    def call(self, method: str, request: Any) -> Any:
        """The daemon's reply to one call. Raises EcdError."""
        return call(getattr(self.stub(), method), request, self.address)

    def entries(self, request: pb.ListRequest) -> Iterator[pb.EntryInfo]:
        """All entries that the request selects, page by page. Raises EcdError."""
        stub = self.stub()
        while True:
            page = call(stub.List, request, self.address)
            yield from page.entries
            if not page.next_after:
                return
            request.after = page.next_after

    def show(self, as_json: bool, result: dict[str, Any], text: str) -> None:
        """Print a command's result: the dict for programs, the text for people."""
        if as_json or self.as_json:
            render.as_json(out, result)
        else:
            out.print(render.legible_lines(text), markup=False)


class CommandFailed(EcdError):
    """The command ends with this message and an exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def fail(code: int, text: str) -> NoReturn:
    """End the command with a message and an exit code."""
    raise CommandFailed(code, text)


def confirm(question: str, refusal: str) -> None:
    """Ask on the terminal, and end the command unless the answer is yes; without one, refuse."""
    if not sys.stdin.isatty():
        fail(USAGE, refusal)
    typer.confirm(question, abort=True, err=True)


def seconds(option: str, duration: str | None) -> float:
    """The seconds of an option's duration; 0 where none is given."""
    try:
        return 0.0 if duration is None else seconds_of(duration)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {error}, got {duration!r}") from None
