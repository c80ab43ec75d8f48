"""The commands that keep an entry in memory, and keep it no more."""

from __future__ import annotations

from typing import Annotated

import typer

from ecd_client.cli import names
from ecd_client.cli.context import FAILED, AsJson, MmHash, Namespace, Options, fail, seconds
from ecd_proto.contract import duration_text, size_text
from ecd_proto.v1 import cache_pb2 as pb


def keep(
    context: typer.Context,
    key: MmHash,
    namespace: Namespace = None,
    for_: Annotated[
        str | None,
        typer.Option("--for", help="How long: 30s, 2h, 1d, at most 3650d. Default: until unkeep."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Keep an entry in memory: it is not evicted for room. A TTL and `evict` still remove it."""
    for_s = seconds("--for", for_)
    if for_ is not None and not for_s:
        raise typer.BadParameter("--for 0 keeps nothing: leave it out to keep it until unkeep")
    options: Options = context.obj
    namespace, key = names.whole_key(options, key, namespace)
    reply = _ask(options, key, namespace, pb.KeepRequest(for_s=for_s))
    if reply.outcome == pb.KeepReply.OUTCOME_TOO_MUCH:
        fail(
            FAILED,
            f"{key!r} takes {size_text(reply.nbytes)}, and {size_text(reply.kept_bytes)} of at "
            f"most {size_text(reply.kept_most_bytes)} are kept: `ecd-cli ls --kept` lists them, "
            "`ecd-cli unkeep` ends one, a larger pool has room for more",
        )
    said = f"kept for {duration_text(for_s)}" if for_s else "kept until `ecd-cli unkeep`"
    options.show(as_json, {"mm_hash": key, "kept": True, "for_s": for_s or None}, said)


def unkeep(
    context: typer.Context,
    key: MmHash,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Allow eviction of a kept entry again."""
    options: Options = context.obj
    namespace, key = names.whole_key(options, key, namespace)
    reply = _ask(options, key, namespace, pb.KeepRequest(stop=True))
    if reply.outcome == pb.KeepReply.OUTCOME_NOT_KEPT:
        fail(FAILED, f"{key!r} was not kept: `ecd-cli ls --kept` lists what is")
    options.show(as_json, {"mm_hash": key, "kept": False}, "no longer kept")


def _ask(options: Options, key: str, namespace: str, request: pb.KeepRequest) -> pb.KeepReply:
    request.key.namespace, request.key.mm_hash = namespace, key
    reply: pb.KeepReply = options.call("Keep", request)
    if reply.outcome == pb.KeepReply.OUTCOME_MISSING:
        fail(FAILED, f"no entry {key!r} in the namespace {namespace!r} is in memory")
    return reply
