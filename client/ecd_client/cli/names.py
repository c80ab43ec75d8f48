"""Keys and namespaces as people type them: whole, by a unique beginning, or as tables show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ecd_client.cli.context import FAILED, USAGE, Options, fail
from ecd_client.cli.render import short, short_namespace
from ecd_proto.v1 import cache_pb2 as pb

MAX_CANDIDATES = 10
"""Names listed where several begin as typed."""


def whole_key(
    options: Options,
    typed: str,
    namespace: str | None,
    completes: bool = True,
    default: str | None = None,
) -> tuple[str, str]:
    """The namespace and the mm_hash of the entry that is meant.

    A key in a given namespace that no entry in memory has stays as typed: it may be on disk or on
    another node. Without `completes` both names are as typed. `default` is the namespace of a key
    that no entry in memory has; else such a key ends the command.
    """
    if namespace is not None:
        namespace = whole_namespace(options, namespace) if completes else namespace
        key = pb.Key(namespace=namespace, mm_hash=typed)
        if not completes or options.call("Contains", pb.ContainsRequest(keys=[key])).contained[0]:
            return namespace, typed
    found = _found(options, typed, namespace, completes)
    namespace = namespace or default
    if not found and namespace is not None:
        return namespace, typed
    if not found:
        fail(FAILED, f"no entry {typed!r} in any namespace")
    (mm_hash, name), *others = found
    if others:
        rows = [f"  --namespace {name!r}" for _, name in found]
        fail(USAGE, f"{mm_hash!r} is in several namespaces; say which:\n{_some(rows)}")
    return name, mm_hash


def completed(options: Options, typed: str, namespace: str | None) -> str:
    """The mm_hash of the entry in memory that is meant; as typed, if there is none."""
    found = _found(options, typed, namespace)
    return found[0][0] if found else typed


def whole_namespace(options: Options, typed: str) -> str:
    """The one namespace with entries in memory that is meant; as typed, if there is none."""
    status = options.call("Status", pb.StatusRequest())
    known = {each.namespace for each in status.namespaces}
    if typed not in known and status.other_namespaces.entries:
        known = {each.key.namespace for each in options.entries(pb.ListRequest())}
    meant = _meant(typed, known, short_namespace)
    if len(meant) > 1:
        rows = [f"  {name!r}" for name in sorted(meant)]
        fail(USAGE, f"several namespaces begin with {typed!r}; type more of one:\n{_some(rows)}")
    return meant.pop() if meant else typed


def _found(
    options: Options, typed: str, namespace: str | None, completes: bool = True
) -> list[tuple[str, str]]:
    """The one key in memory that is meant, and its namespaces, a pair for each."""
    beginning = typed.partition("..")[0] if completes else typed
    request = pb.ListRequest(namespace=namespace, mm_hash_prefix=beginning)
    listed = {(each.key.mm_hash, each.key.namespace) for each in options.entries(request)}
    meant = _meant(typed, (key for key, _ in listed), short if completes else str)
    found = sorted(pair for pair in listed if pair[0] in meant)
    if len(meant) > 1:
        rows = [f"  {key!r} in {name!r}" for key, name in found]
        fail(USAGE, f"several keys begin with {typed!r}; type more of one:\n{_some(rows)}")
    return found


def _meant(typed: str, known: Iterable[str], shown: Callable[[str], str]) -> set[str]:
    """The name as typed, else those that `shown` shortens, and that begin or are shown like this.

    Other names are shown whole: `img-1` never stands for `img-10`.
    """
    names = set(known)
    if typed in names or not typed:
        return names & {typed}
    shortened = {name for name in names if shown(name) != name}
    first, dots, last = typed.rpartition("..")
    if dots and first and last:
        as_shown = {each for each in shortened if each.startswith(first) and each.endswith(last)}
        if as_shown:
            return as_shown
    return {name for name in shortened if name.startswith(typed)}


def _some(rows: list[str]) -> str:
    more = len(rows) - MAX_CANDIDATES
    return "\n".join(rows[:MAX_CANDIDATES] + ([f"  and {more:,} more"] if more > 0 else []))
