"""Notes that ranks leave for each other before anything else stands."""

from __future__ import annotations

import gc
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.wording import raising

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
    with raising(PeerLost, "rank 0"):
        rendezvous.get("about 1")


@pytest.mark.long
def test_the_store_of_rank_0_outlives_its_first_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes to the second meeting first counts it in the store of the first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = RankEnvironment(0, 2, "127.0.0.1")
    for number in (1, 2):
        Rendezvous(place, "test").put("number", number)
        gc.collect()
    other = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=5))
    assert other.add("dure/test/0", 0) == 2
    assert other.get("dure/test/meeting 1/number") == b"1"
