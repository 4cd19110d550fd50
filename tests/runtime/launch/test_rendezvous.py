"""Notes that ranks leave for each other before anything else stands."""

from __future__ import annotations

import threading

import pytest

from dure.errors import PeerLost
from dure.runtime.launch.rendezvous import RankEnvironment, Rendezvous


class Hurried:
    """A store in which everything is written between the first look at a note and the next."""

    def __init__(self, rendezvous: Rendezvous, others: dict[str, str]) -> None:
        self.store = rendezvous.store
        self.others = others

    def check(self, keys: list[str]) -> bool:
        there = self.store.check(keys)
        while self.others:
            self.store.set(*self.others.popitem())
        return bool(there)

    def get(self, key: str) -> bytes:
        return self.store.get(key)  # type: ignore[no-any-return]


def test_a_note_counts_though_its_writer_has_failed_since() -> None:
    rendezvous = Rendezvous(RankEnvironment(), "test")
    rendezvous.store = Hurried(rendezvous, {"about 1": "7", "failure": '"rank 1 failed"'})
    assert rendezvous.get("about 1") == 7


def test_who_waits_for_a_rank_that_has_failed_hears_of_it() -> None:
    rendezvous = Rendezvous(RankEnvironment(), "test")
    threading.Timer(0.1, rendezvous.fail, ["too little memory"]).start()
    with pytest.raises(PeerLost, match="rank 0 waited for the others: rank 0 failed with too little memory"):
        rendezvous.get("about 1")
