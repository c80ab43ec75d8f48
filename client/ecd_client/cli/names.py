"""Keys and namespaces as people type them: whole, as tables show them, or a digest's beginning."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ecd_client.cli.context import FAILED, USAGE, Options, errors, fail
from ecd_client.cli.render import legible, short, short_namespace
from ecd_proto.v1 import cache_pb2 as pb

MAX_CANDIDATES = 10
"""Names listed where several are meant."""
_DIGEST = re.compile(r"[0-9a-f]{32,}")
_BEGINNING = re.compile(r"[0-9a-f]{6,31}")
"""The first digits of a digest: 32 of them could be a whole one."""


def whole_key(
    options: Options,
    typed: str,
    namespace: str | None,
    completes: bool = True,
    default: str | None = None,
) -> tuple[str, str]:
    """The namespace and the mm_hash of the entry that is meant.

    A key in a given namespace that no entry in memory has stays as typed: it may be on disk or on
    another node. stderr says what a completed name stands for. Without `completes` both names are
    as typed. `default` is the namespace of a key that no entry in memory has; else such a key ends
    the command.
    """
    if namespace is not None:
        namespace = whole_namespace(options, namespace) if completes else namespace
        key = pb.Key(namespace=namespace, mm_hash=typed)
        if not completes or options.call("Contains", pb.ContainsRequest(keys=[key])).contained[0]:
            return namespace, typed
    pairs = found(options, typed, namespace, completes)
    namespace = namespace or default
    if not pairs and namespace is not None:
        return namespace, typed
    if not pairs:
        fail(FAILED, f"no entry {typed!r} in any namespace")
    (mm_hash, name), *others = pairs
    if others:
        rows = [f"  --namespace {name!r}" for _, name in pairs]
        fail(USAGE, f"{mm_hash!r} is in several namespaces; say which:\n{_some(rows)}")
    return name, mm_hash


def found(
    options: Options, typed: str, namespace: str | None, completes: bool = True
) -> list[tuple[str, str]]:
    """The one key in memory that is meant, and its namespaces, a pair for each."""
    beginning = typed.partition("..")[0] if completes else typed
    request = pb.ListRequest(namespace=namespace, mm_hash_prefix=beginning)
    listed = {(each.key.mm_hash, each.key.namespace) for each in options.entries(request)}
    meant = _meant(typed, (key for key, _ in listed), short if completes else str)
    pairs = sorted(pair for pair in listed if pair[0] in meant)
    if len(meant) > 1:
        rows = [f"  {key!r} in {name!r}" for key, name in pairs]
        fail(USAGE, f"{typed!r} may be several keys; type more of one:\n{_some(rows)}")
    if pairs:
        _tell(typed, pairs[0][0])
    return pairs


def whole_namespace(options: Options, typed: str) -> str:
    """The one namespace with entries in memory that is meant; as typed, if there is none."""
    if ".." not in typed:
        return typed
    status = options.call("Status", pb.StatusRequest())
    known = {each.namespace for each in status.namespaces}
    if typed not in known and status.other_namespaces.entries:
        known = {each.key.namespace for each in options.entries(pb.ListRequest())}
    meant = _meant(typed, known, short_namespace)
    if len(meant) > 1:
        rows = [f"  {name!r}" for name in sorted(meant)]
        fail(USAGE, f"{typed!r} may be several namespaces; type more of one:\n{_some(rows)}")
    name = meant.pop() if meant else typed
    _tell(typed, name)
    return name


def _meant(typed: str, known: Iterable[str], shown: Callable[[str], str]) -> set[str]:
    """The name as typed, else those that it shortens: a whole name stands for no other.

    `beginning..end` is a name that `shown` shortens. A key that is a digest may be its beginning.
    """
    names = set(known)
    if typed in names or not typed:
        return names & {typed}
    shortened = {name for name in names if shown(name) != name}
    first, dots, last = typed.rpartition("..")
    if dots and first and last:
        return {each for each in shortened if each.startswith(first) and each.endswith(last)}
    if shown is short and _BEGINNING.fullmatch(typed):
        return {each for each in names if each.startswith(typed) and _DIGEST.fullmatch(each)}
    return set()


def _tell(typed: str, name: str) -> None:
    if name != typed:
        errors.print(f"{legible(typed)} stands for {legible(name)}", markup=False)


def _some(rows: list[str]) -> str:
    more = len(rows) - MAX_CANDIDATES
    return "\n".join(rows[:MAX_CANDIDATES] + ([f"  and {more:,} more"] if more > 0 else []))
