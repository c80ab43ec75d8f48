"""The documents of `--json`: null for what there is none of, bounds, and numbers that end."""

from __future__ import annotations

import re

import pytest

from ecd.core import counters
from ecd.core.pool.pool import REASONS
from ecd.live.flights import Outcome
from ecd.live.slow_log import DISK_READ, FETCH
from ecd.memory.disk.disk_limits import FAILURE_KINDS, SKIP_CAUSES
from ecd_proto import contract
from ecd_proto.plain import plain, status_document
from ecd_proto.v1 import cache_pb2 as pb


def test_what_there_is_none_of_is_null() -> None:
    space = pb.NamespaceStatus(namespace="n")
    said = status_document(pb.StatusReply(namespaces=[space], pools=[pb.PoolStatus(kind="host")]))
    assert (said["disk"], said["node"], said["events"], said["events_replay"]) == (None,) * 4
    [found] = said["namespaces"]
    assert (found["quota_bytes"], found["ttl_s"], found["entries"]) == (None, None, 0)
    assert said["pools"][0]["problem"] is None
    assert plain(pb.EntryInfo())["expires_in_s"] is None
    space.quota_bytes = 0
    assert plain(space)["quota_bytes"] == 0


def test_a_status_has_a_name_an_address_and_bounds() -> None:
    counted = pb.Counters(put_sizes=[0] * 12, idle_evictions=[0] * 8)
    pools = [pb.PoolStatus(pool=number, kind="device") for number in range(2)]
    said = status_document(pb.StatusReply(counters=counted, pools=pools), "unix:///s")
    assert (said["schema"], said["address"]) == ("ecd.status/1", "unix:///s")
    assert "address" not in status_document(pb.StatusReply())
    assert [pool["name"] for pool in said["pools"]] == ["device", "device1"]
    for name, bounds in (("put_sizes", "bytes"), ("idle_evictions", "s")):
        of = said["counters"]
        assert len(of[name]) == len(of[f"{name}_bounds_{bounds}"]) + 1, "the last is without one"


@pytest.mark.parametrize(
    "names",
    [
        *([each.value for each in Outcome], [DISK_READ, FETCH], counters.CAUSES),
        *(REASONS, FAILURE_KINDS, SKIP_CAUSES),
    ],
)
def test_names_by_which_events_are_counted_have_no_blanks(names: list[str]) -> None:
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", name) for name in names), names


def test_the_bounds_are_those_by_which_the_core_counts() -> None:
    assert contract.IDLE_BOUNDS_S == counters.IDLE_BOUNDS_S
    assert contract.SIZE_BOUNDS_BYTES == counters.SIZE_BOUNDS_BYTES


def test_times_are_rounded() -> None:
    reply = pb.StatusReply(uptime_s=1234.56789012345, counters=pb.Counters(saved_s=0.1234567891))
    said = plain(reply)
    assert (said["uptime_s"], said["counters"]["saved_s"]) == (1234.568, 0.123457)
    event = plain(pb.SlowEvent(unix_s=1.7e9 + 1 / 3, stages={"disk": 2 / 3}))
    assert (event["unix_s"], event["stages"]) == (1700000000.333, {"disk": 0.666667})
