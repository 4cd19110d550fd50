"""A node's connections."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from support.raw_caller import CREDENTIALS
from support.wording import raising

from dure.core.node import Address
from dure.errors import PeerLost, Refused
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity, WireLimits

HANDSHAKE_SECONDS = 0.3


@pytest.fixture
def node():
    """A function that makes nodes, which are closed in the end."""
    torch.set_num_threads(1)
    made = []

    def make(name, credentials=CREDENTIALS):
        limits = WireLimits(handshake_seconds=HANDSHAKE_SECONDS)
        made.append(ProcessNode(Identity("job", name), credentials, limits=limits))
        return made[-1]

    yield make
    for each in made:
        each.wire.close(timeout=0.0)
        each.loop.end()


def turn(seconds, *nodes):
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        for each in nodes:
            each.loop.turn(0.0)


def started(caller, host):
    """A call that has no answer until the host's node is served; its connection stands half."""
    caller.directory["server 0"] = ("127.0.0.1", host.wire.listen())
    calling = caller.call(Address("server 0", "outbox"), "fetch", into=[torch.zeros(3)], timeout=30.0, tag=1)
    calling.when_done(lambda: None)
    return calling


@pytest.mark.long
def test_a_caller_that_was_stopped_during_its_greeting_greets_again(node):
    host, caller = node("server 0"), node("worker 0")
    calling = started(caller, host)
    turn(3 * HANDSHAKE_SECONDS, host)  # the caller is stopped meanwhile, and the host gives its connection up
    host.send("worker 0", torch.ones(3), tag=1)
    turn(2.0, host, caller)
    assert calling.done
    assert calling.result().fields == {}


@pytest.mark.long
def test_a_host_that_was_stopped_during_a_greeting_lets_the_caller_in(node):
    host, caller = node("server 0"), node("worker 0")
    calling = started(caller, host)
    turn(3 * HANDSHAKE_SECONDS, caller)
    host.send("worker 0", torch.ones(3), tag=1)
    turn(2.0, host, caller)
    assert calling.done
    assert calling.result().fields == {}


@pytest.mark.long
def test_a_greeting_is_given_up_where_the_host_is_gone(node):
    host, caller = node("server 0"), node("worker 0")
    calling = started(caller, host)
    turn(3 * HANDSHAKE_SECONDS, host)
    host.wire.close(timeout=0.0)
    turn(2.0, caller)
    with raising(PeerLost, "server 0"):
        calling.result()


def test_a_caller_without_the_key_is_refused_once(node):
    host, caller = node("server 0"), node("worker 0", replace(CREDENTIALS, key=bytes(32)))
    calling = started(caller, host)
    turn(1.0, host, caller)
    with raising(Refused, "process"):
        calling.result()
