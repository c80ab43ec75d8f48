"""Proofs of the cluster's token that were accepted: remembered in time, and bounded."""

from __future__ import annotations

import pytest

from ecd.rpc.peer import peer_token
from ecd.rpc.peer.peer_token import SpentProofs


def test_a_proof_is_remembered_for_as_long_as_its_time_is_acceptable() -> None:
    spent = SpentProofs()
    assert spent.spend("a", 600.0, 0.0) is True
    assert spent.spend("b", 300.0, 0.0) is True
    assert [spent.spend(proof, 600.0, 300.0) for proof in "ab"] == [False, False]
    assert spent.spend("b", 900.0, 301.0) is True, "it is too old to be accepted, if it comes again"
    assert spent.spend("a", 600.0, 600.0) is False
    assert spent.spend("a", 900.0, 601.0) is True


def test_no_more_are_accepted_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_token, "MAX_PROOFS", 3)
    spent = SpentProofs()
    offered = {"a": 9.0, "b": 5.0, "c": 9.0, "d": 9.0}
    accepted = [spent.spend(proof, until_s, 0.0) for proof, until_s in offered.items()]
    assert accepted == [True, True, True, None]
    assert spent.spend("a", 9.0, 5.0) is False
    assert spent.spend("d", 9.0, 6.0) is True, "b's time is over"
    assert spent.spend("e", 9.0, 6.0) is None
