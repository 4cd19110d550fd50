"""Encoded messages that no encoder made, in good frames from a real socket: refused, never decoded, never a crash.

And good messages in damaged frames, which a node does not even hear of.
"""

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.raw_caller import CREDENTIALS, RawCaller, frame
from support.wording import raising

from dure.codec.coder import SliceLayout
from dure.codec.exchange import add_up
from dure.core.meter import Meter
from dure.core.node import Address, nothing
from dure.errors import DamagedMessage, Refused
from dure.job.optimizer import OptimizerSpec
from dure.run.strategy import make
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity
from dure.runtime.wire.frame import Kind
from dure.topology.collective.compressed import CompressedGroup
from dure.topology.parameter_server.shard import Shard

NUMEL = 41
MEANS = ["fp32", "fp16", "bf16", "int8", "1bit", "strom:threshold=0.5", "top-k:share=0.2", "sign:scaled=true+ef"]
VOTES = ["sign", "ternary", "ternary:coding=planes", "it-sign"]


def message_of(codec, numel=NUMEL):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    return bytes(make(codec, "codec").coder(SliceLayout.plain(numel)).encode(values).numpy())


class Stranger:
    """Worker 1, by hand: a plain socket, and the node that it speaks to, turned by this thread."""

    def __init__(self, node):
        self.node = node
        self.port = node.wire.listen(unix=False)
        self.raw = None
        self.requests = 0

    def enter(self):
        self.leave()
        self.raw = RawCaller(self.port, self.until)
        self.raw.enter()

    def leave(self):
        if self.raw is not None:
            self.raw.sock.close()
            self.until(lambda: not self.node.wire.callers)
        self.raw = None

    def until(self, condition, seconds=60.0):
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, "it did not happen"
            self.node.loop.turn(0.001)

    def request(self, service, method, message, **fields):
        """What a request is made of."""
        self.requests += 1
        meta = {"service": service, "method": method, "fields": fields, "tensors": [["uint8", len(message)]]}
        return meta, message, self.requests

    def send(self, request):
        self.raw.sock.sendall(self.bytes_of(request))

    def bytes_of(self, request):
        """A request's bytes, as good as any."""
        meta, message, number = request
        return frame(Kind.REQUEST, meta, message, request=number, seals=self.raw.seals)

    def answer(self):
        """Kind and meta of the answer to the last request."""
        while True:
            found = self.raw.frame()
            if found.header.request == self.requests:
                return found.header.kind, found.meta


@pytest.fixture
def stranger():
    torch.set_num_threads(1)
    made = []

    def build(name):
        node = ProcessNode(Identity("job", name), CREDENTIALS)
        made.append(Stranger(node))
        return made[-1]

    yield build
    for each in made:
        if each.raw is not None:
            each.raw.sock.close()
        each.node.wire.close(timeout=0.0)


def served(stranger, codec):
    """A shard whose updates travel as `codec` has it, and worker 1 before it."""
    caller = stranger("server 0")
    coder = make(codec, "codec").coder(SliceLayout.plain(NUMEL))
    shard = Shard(caller.node, torch.zeros(NUMEL), OptimizerSpec("sgd", lr=1.0), coder=coder)
    caller.node.serve("shard 0", shard)
    return caller, shard


def push(caller, message, seq, ordered=False, incarnation=0):
    return caller.request(
        "shard 0", "push", message, worker=1, incarnation=incarnation, seq=seq, base=0, weight=1.0, ordered=ordered
    )


def damages(codec, good):
    """Messages that `codec` does not make, of a length that may be one."""
    short = [good[:-1], b"", good + b"\0"]
    infinity = {"fp32": 4, "fp16": 2, "bf16": 2}
    if codec in infinity:
        return [*short, b"\xff" * infinity[codec] + good[infinity[codec] :]]
    if codec.startswith("sign:"):
        return [*short, good[:-4] + np.float32(-1).tobytes(), good[:-4] + np.float32(np.nan).tobytes()]
    if codec in ("int8", "1bit", "top-k:share=0.2"):  # their last bytes are a float
        return [*short, good[:-4] + np.float32(np.inf).tobytes()]
    if codec == "sign":
        return [*short, good[:-1] + b"\xff"]
    if codec == "ternary:coding=planes":
        return [*short, b"\0" * 6 + b"\xff" * 6]
    return [*short, b"\xff" * len(good), b"\xff\xff\xff\xff" + good[4:]]  # counts


@pytest.mark.parametrize("codec", MEANS)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_shard_refuses_what_no_encoder_made(stranger, codec, ordered):
    caller, shard = served(stranger, codec)
    good = message_of(codec)
    caller.enter()
    bad = [message for message in damages(codec, good) if len(message) <= shard.updater.rule.coder.most_bytes]
    for seq, message in enumerate(bad, start=1):
        caller.send(push(caller, message, seq, ordered, incarnation=seq))  # after three it must join again
        kind, meta = caller.answer()
        assert kind == Kind.ERROR
        assert f"update {seq} of worker 1 is damaged" in str(meta)
        assert shard.refused == seq
    assert (shard.applied, len(shard.staging), shard.version) == (0, 0, 0)
    assert not shard.values.any()
    caller.send(push(caller, good, 1, ordered, incarnation=len(bad) + 1))
    assert caller.answer()[0] == Kind.REPLY
    assert shard.applied + len(shard.staging) == 1
    assert bool(shard.values.any()) is not ordered


@pytest.mark.parametrize("codec", MEANS)
def test_after_three_damaged_messages_in_a_row_a_worker_must_join_again(stranger, codec):
    caller, shard = served(stranger, codec)
    good = message_of(codec)
    caller.enter()
    for seq in (1, 2, 3):
        caller.send(push(caller, good[:-1], seq))
        assert "is damaged" in str(caller.answer()[1])
    caller.send(push(caller, good, 4))
    kind, meta = caller.answer()
    assert kind == Kind.ERROR
    assert "join again" in str(meta)
    assert not shard.values.any()
    caller.send(push(caller, good, 1, incarnation=1))
    assert caller.answer()[0] == Kind.REPLY
    assert (shard.applied, shard.refused) == (1, 4)


@pytest.mark.parametrize("codec", MEANS)
def test_a_shard_takes_no_message_longer_than_any_can_be(stranger, codec):
    """Said from the server's own numbers, before a byte of it is decoded."""
    caller, shard = served(stranger, codec)
    caller.enter()
    caller.send(push(caller, bytes(shard.updater.rule.coder.most_bytes + 1), 0))
    kind, meta = caller.answer()
    assert kind == Kind.ERROR
    assert str(shard.updater.rule.coder.most_bytes) in str(meta)
    assert (shard.applied, shard.refused) == (0, 0)
    assert not shard.values.any()


def test_flipped_bits_never_reach_a_decoder(stranger):
    caller, shard = served(stranger, "1bit")
    chance, good = random.Random(1), push(caller, message_of("1bit"), 1)
    caller.enter()
    caller.send(good)
    assert caller.answer()[0] == Kind.REPLY
    assert shard.applied == 1
    before, flips = shard.values.clone(), 60
    for _ in range(flips):
        caller.enter()
        bad = caller.bytes_of(push(caller, message_of("1bit"), 2))
        bit = chance.randrange(len(bad) * 8)
        bad[bit // 8] ^= 1 << bit % 8
        caller.raw.sock.sendall(bad)
        caller.until(lambda: not caller.node.wire.callers)
    assert caller.node.wire.refused + caller.node.wire.damaged == flips
    assert (shard.applied, shard.refused) == (1, 0)
    assert torch.equal(shard.values, before)


@pytest.mark.parametrize("codec", [*MEANS, *VOTES])
def test_a_coded_group_refuses_what_no_encoder_made(stranger, codec):
    """The round ends with an error for who sent it and for who waits, and nothing is made of it."""
    coder = make(codec, "codec").coder(SliceLayout.plain(NUMEL))
    for message in damages(codec, message_of(codec)):
        if len(message) > coder.most_bytes:
            continue
        caller = stranger("worker 0")
        group = SimpleNamespace(ranks=(0, 1))
        shape = SimpleNamespace(start=0, stop=NUMEL if gathers(codec) else 2 * NUMEL, shape=(1, NUMEL))
        coded = CompressedGroup(caller.node, group, make(codec, "codec"), [shape], Meter("worker 0"))
        method = "take" if coded._gathers else "give"
        mine = torch.from_numpy(np.frombuffer(message_of(codec), np.uint8).copy())
        into = [] if coded._gathers else [torch.empty(coder.most_bytes, dtype=torch.uint8)]
        ours = caller.node.call(Address("worker 0", "stripe"), method, mine, into=into, round=1, share=0.5)
        ours.when_done(nothing)
        caller.enter()
        caller.send(caller.request("stripe", method, message, round=1, share=0.5))
        kind, meta = caller.answer()
        if method == "give":
            assert kind == Kind.ERROR
            assert "round 1" in str(meta)
            with raising(Refused, "round 1"):
                caller.node.loop.run_until(ours)
        else:  # it has arrived; everybody adds up for himself
            assert kind == Kind.REPLY
            with pytest.raises(DamagedMessage):
                add_up(coded._coders[0], coded._desk.messages(1), torch.zeros(NUMEL))


def gathers(codec):
    return make(codec, "codec").exchange == "all_gather"
