"""Heartbeats between ranks, each a process of its own that rank 0's monitor hears over the wire."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from support.wording import raising

from dure.errors import PeerLost
from dure.runtime.launch.monitor import HeartbeatCaller, RankMonitor
from dure.runtime.launch.rendezvous import NoteSeal, RankEnvironment, Rendezvous
from dure.runtime.wire import Credentials

SOON = 1.0
LATEST = 20.0


def met(rank: int, port: int) -> Rendezvous:
    """The rendezvous of one of two ranks, in the store at `port`."""
    one = Rendezvous.__new__(Rendezvous)
    one.place = RankEnvironment(rank, 2, "127.0.0.1")
    one.seal = NoteSeal(None)
    one._met = True
    one.store = dist.PrefixStore(  # type: ignore[attr-defined]
        "test", dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=LATEST))
    )
    return one


class Ranks:
    """Rank 0 in this process, and rank 1 in a child, which runs `act` on its monitor."""

    def __init__(self, act: Callable[[RankMonitor], None], *, beat: Any = None) -> None:
        self.credentials = Credentials(secrets.token_bytes(32))
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        with warnings.catch_warnings():  # the child takes no lock that a thread of this process may hold
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            with contextlib.suppress(BaseException):
                act(RankMonitor(met(1, store.port), self.credentials, SOON))
            os._exit(0)
        self.store = store
        self.monitor = RankMonitor(met(0, store.port), self.credentials, SOON, beat)

    def hears_rank_1(self) -> bool:
        return "rank 1" in self.monitor._silence

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.monitor.close()


@contextlib.contextmanager
def ranks(act: Callable[[RankMonitor], None], **given: Any) -> Iterator[Ranks]:
    with contextlib.closing(Ranks(act, **given)) as both:
        until(both.hears_rank_1 if not given else lambda: True)
        yield both


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LATEST
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def checked(monitor: RankMonitor, seconds: float) -> None:
    """Check the monitor many times in `seconds`, as a waiting thread does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        monitor.check()
        time.sleep(0.05)


def lives(monitor: RankMonitor) -> None:
    time.sleep(LATEST)


def ends_in_order(monitor: RankMonitor) -> None:
    until(lambda: "rank 0" in monitor._silence)
    time.sleep(0.3)  # rank 0 hears of it
    monitor.close()


@pytest.mark.long
def test_a_stopped_rank_is_noticed_though_garbage_fills_the_port_of_heartbeats() -> None:
    with ranks(lives) as both:
        held = []
        for _ in range(300):  # more than the half-open connections that the monitor keeps
            held.append(socket.create_connection(both.monitor.address))
            held[-1].send(os.urandom(25))
        checked(both.monitor, 1.2 * SOON)
        os.kill(both.pid, signal.SIGSTOP)
        began = time.monotonic()
        with raising(PeerLost, "rank 1"):
            checked(both.monitor, LATEST)
        assert SOON / 2 < time.monotonic() - began < LATEST
        for each in held:
            each.close()


def test_a_rank_that_ends_in_order_is_not_silent() -> None:
    with ranks(ends_in_order) as both:
        until(lambda: not both.hears_rank_1())
        both.monitor.check()


def test_beats_of_processes_with_the_key_alone_reach_the_driver() -> None:
    beats: list[tuple[int, int, bool]] = []
    with ranks(lives, beat=lambda *beat: beats.append(beat)) as both:
        stranger = HeartbeatCaller("worker 1", both.monitor.address, Credentials(bytes(32)))
        mine = HeartbeatCaller("worker 1", both.monitor.address, both.credentials)
        for clock in range(50):
            stranger.send("beat", 0.05, number=1, clock=1000, waiting=False)
            mine.send("beat", 0.05, number=1, clock=clock, waiting=True)
        assert (1, 49, True) in beats
        assert {(number, waiting) for number, _, waiting in beats} == {(1, True)}
        mine.send("beat", 0.5, number=-1, clock=0, waiting=True)
        assert beats[-1][0] == 1
        for each in (stranger, mine):
            each.wire.close(0.1)
