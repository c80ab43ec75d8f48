"""`ecd-cli clients`: who holds the pool, and how to end a client's session."""

from __future__ import annotations

import pwd
from typing import Annotated, Any

import typer
from rich.table import Table

from ecd_client.cli import render
from ecd_client.cli.context import FAILED, AsJson, Options, confirm, errors, fail, out
from ecd_client.cli.render import escape
from ecd_proto import tables
from ecd_proto.contract import count_text, duration_text, size_text
from ecd_proto.plain import plain
from ecd_proto.v1 import cache_pb2 as pb

State = pb.ClientInfo.State
STATES = {
    State.STATE_OPEN: "open",
    State.STATE_ENDED: "ended; its process still holds memory",
    State.STATE_WAITING_FOR_DMA: "dead; a GPU may still copy",
}

app = typer.Typer()


@app.callback(invoke_without_command=True)
def clients(context: typer.Context, as_json: AsJson = False) -> None:
    """Show each client's process and what it holds of the pools, the largest holder first."""
    if context.invoked_subcommand is not None:
        context.obj.as_json |= as_json
        return
    options: Options = context.obj
    with errors.status("asking the daemon ..."):
        reply = options.call("Clients", pb.ClientsRequest())
    found = sorted(reply.clients, key=_order)
    if as_json or options.as_json:
        shown = {"clients": [_plain(client) for client in found], "others": plain(reply.others)}
        render.as_json(out, shown)
        return
    if found:
        tables.show(out, _table(found))
    else:
        out.print("No clients.")
    if any(reply.others.ListFields()):
        others = f"{_entries(reply.others)} leased, {size_text(reply.others.reserved_bytes)}"
        out.print(f"Other nodes and this daemon's own fetches: {others} being written.")


@app.command()
def end(
    context: typer.Context,
    ids: Annotated[
        list[int], typer.Argument(metavar="ID", help="Clients, as `ecd-cli clients` lists them.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """End clients' sessions, as if they had disconnected. A client that lives connects anew.

    What its process still reads or writes is kept until it is done with that, or ends.
    """
    options: Options = context.obj
    known = {client.id: client for client in options.call("Clients", pb.ClientsRequest()).clients}
    ids = list(dict.fromkeys(ids))
    for number in ids:
        if number not in known:
            fail(FAILED, f"no client has the ID {number}: `ecd-cli clients` lists them")
        if known[number].state != State.STATE_OPEN:
            fail(
                FAILED,
                f"{_name(known[number])} has ended already: what it holds comes back when its "
                "process has ended, and a GPU's copies for it are over",
            )
    named = ", ".join(_name(known[number]) for number in ids)
    if not yes:
        confirm(f"End {named}?", f"this would end {named}; not a terminal: add --yes")
    ended = options.call("EndClients", pb.EndClientsRequest(ids=ids)).ended
    gone = [number for number, is_ended in zip(ids, ended, strict=True) if is_ended]
    held_bytes = sum(_held_bytes(known[number]) for number in gone)
    text = f"ended {count_text(len(gone), 'session')}"
    if held_bytes:
        text += (
            f", which held {size_text(held_bytes)}. What a process still reads or writes stays in "
            "`ecd-cli clients` until it is done with that, or ends"
        )
    options.show(as_json, {"ended": gone, "held_bytes": held_bytes}, text)
    if len(gone) < len(ids):
        left = ", ".join(str(number) for number in ids if number not in gone)
        fail(FAILED, f"ended by themselves meanwhile: {left}")


def _order(client: pb.ClientInfo) -> tuple[int, int, int]:
    return -_held_bytes(client), -client.held.granted_bytes, client.id


def _held_bytes(client: pb.ClientInfo) -> int:
    return client.held.leased_bytes + client.held.reserved_bytes


def _name(client: pb.ClientInfo) -> str:
    return f"{client.id} ({client.client}, pid {client.seen_pid or client.pid})"


def _plain(client: pb.ClientInfo) -> dict[str, Any]:
    uid = client.uid if client.HasField("uid") else None
    return {**plain(client), "uid": uid, "user": _user(client)}


def _user(client: pb.ClientInfo) -> str | None:
    """The name of the process's user here; None if the user is not known."""
    try:
        return pwd.getpwuid(client.uid).pw_name if client.HasField("uid") else None
    except (KeyError, OverflowError):
        return None


def _entries(held: pb.Held) -> str:
    if not held.entries:
        return "none"
    return f"{count_text(held.entries, 'entry')}, {size_text(held.leased_bytes)}"


def _table(found: list[pb.ClientInfo]) -> Table:
    """A row for each client; columns that are empty for all of them are left out."""
    columns: dict[str, list[str]] = {
        "id": [str(each.id) for each in found],
        "pid": [str(each.seen_pid or each.pid) for each in found],
        "own pid": [str(each.pid) if each.seen_pid not in (0, each.pid) else "" for each in found],
        "user": [
            (_user(each) or f"uid {each.uid}") if each.HasField("uid") else "" for each in found
        ],
        "client": [each.client for each in found],
        "namespace": [render.short_namespace(each.namespace) for each in found],
        "age": [duration_text(each.age_s) for each in found],
        "leased": [_entries(each.held) for each in found],
        "being written": [size_text(each.held.reserved_bytes) for each in found],
        "granted": [size_text(each.held.granted_bytes) for each in found],
        "pinned": [size_text(each.pinned_bytes) if each.pinned_bytes else "" for each in found],
        "state": [STATES.get(each.state, "") for each in found],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    table = tables.unframed(*shown)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*map(escape, row))
    return table
