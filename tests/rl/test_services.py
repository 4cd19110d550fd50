"""The services of replay and model refuse wrong calls with one sentence, and keep their state."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.raw_caller import CREDENTIALS
from support.wording import raising

from dure.core.node import Address, Call
from dure.core.state import State
from dure.errors import Refused, RemoteError
from dure.rl.messages import VERSION, InsertionTensors, with_version
from dure.rl.replay import Replay
from dure.rl.services import MOST, ModelService, RateLimiter, ReplayService
from dure.rl.transitions import FRAMES, Column, FrameLayout, Layout
from dure.run.supervisor import MOST_FIGURES, CompanionTracker
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity

PLAIN = with_version(Layout((Column("observation", "float32", (2,)), Column("reward", "float32"))))
STACKS = [Column(name, "uint8", (2, 3, 3)) for name in ("observation", "next_observation")]
FRAMED = with_version(Layout((*STACKS, Column("reward", "float32")), FrameLayout((3, 3), 2)))
HELD = 30


def message(layout, count, priorities=None, **wrong):
    """The tensors of an insertion of `count` transitions, with `wrong` columns in place of right ones."""
    values = {"reward": np.arange(count, dtype=np.float32), VERSION.name: np.zeros(count, np.int64)}
    if layout.frames is None:
        values["observation"] = np.ones((count, 2), np.float32)
    else:
        values |= {each.name: np.zeros((count, 2), np.int32) for each in STACKS}
        values[FRAMES] = np.ones((count + 1, 3, 3), np.uint8)
    given = np.ones(count, np.float32) if priorities is None else np.array(priorities, np.float32)
    return InsertionTensors(layout).tensors(values | wrong, given)


class Served:
    """A replay of 40 transitions, `HELD` of them filled, at a node that a thread turns, and callers of it."""

    def __init__(self, layout):
        self.host = ProcessNode(Identity("job", "replay 0", 0), CREDENTIALS)
        self.replay = Replay(layout, 40, seed=0)
        limiter = RateLimiter(1.0, 1, 1e9)
        self.service = ReplayService(self.host, self.replay, limiter, trim_every=10, actors=["actor 0"])
        self.host.serve("replay", self.service)
        place = ("127.0.0.1", self.host.wire.listen())
        self.callers = {}
        for name in ("actor 0", "actor 1", "worker 0"):
            self.callers[name] = ProcessNode(Identity("job", name, 0), CREDENTIALS)
            self.callers[name].directory["replay 0"] = place
        self.ended, self.failures = threading.Event(), []
        self.thread = threading.Thread(target=self._turn)
        self.thread.start()

    def _turn(self):
        while not self.ended.is_set():
            try:
                self.host.loop.turn(0.01)
            except BaseException as error:  # noqa: BLE001  (a test looks at it)
                self.failures.append(error)
                return

    def ask(self, caller, method, *tensors, into=(), **fields):
        node = self.callers[caller]
        call = node.call(Address("replay 0", "replay"), method, *tensors, into=into, timeout=20, **fields)
        return node.loop.run_until(call)

    def state(self):
        return self.service.state().cloned()

    def close(self):
        self.ended.set()
        self.thread.join()
        for node in (*self.callers.values(), self.host):
            node.wire.close(timeout=0.0)
            node.loop.end()


def served(layout):
    found = Served(layout)
    found.ask("actor 0", "insert", *message(layout, HELD))
    return found


@pytest.fixture(scope="module", params=[PLAIN, FRAMED], ids=["plain", "frames"])
def any_replay(request):
    torch.set_num_threads(1)
    found = served(request.param)
    yield found, request.param
    found.close()


@pytest.fixture(scope="module")
def frames():
    found = served(FRAMED)
    yield found
    found.close()


def same(one: State, other: State) -> bool:
    return one.plain == other.plain and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def refused(served, says, caller, method, *tensors, into=(), **fields):
    before = served.state()
    with pytest.raises(RemoteError, match=says) as caught:
        served.ask(caller, method, *tensors, into=into, **fields)
    assert "has failed" not in str(caught.value), "the handler raised an error that it should have foreseen"
    assert len(str(caught.value)) < 500
    assert same(served.state(), before)
    assert not served.failures
    nothing = message(served.replay.layout, 0)
    with suppress(RemoteError):  # a payload too long to be skipped ends its connection, perhaps only now
        served.ask("actor 0", "insert", *nothing)
    assert served.ask("actor 0", "insert", *nothing).fields["size"] == HELD


KEYS, ONES = torch.arange(3), torch.ones(3)
FOUR, INFINITE = np.ones(4, np.float32), np.full(3, np.inf, np.float32)


@pytest.mark.parametrize(
    ("says", "caller", "method", "tensors", "fields"),
    [
        ("worker 0 may not call insert", "worker 0", "insert", lambda of: message(of, 3), {}),
        ("worker 0 may not call finish", "worker 0", "finish", lambda of: [], {}),
        ("actor 0 may not call sample", "actor 0", "sample", lambda of: [], {"count": 3, "beta": 0.4, "version": 0}),
        ("actor 0 may not call update", "actor 0", "update", lambda of: [KEYS, ONES], {}),
        ("actor 1 does not insert here; actor 0", "actor 1", "insert", lambda of: message(of, 3), {}),
        ("actor 1 does not insert here; actor 0", "actor 1", "finish", lambda of: [], {}),
        ("no field count", "actor 0", "insert", lambda of: message(of, 3), {"count": 3}),
        (r"3 transitions and \d+ values of .*reward", "actor 0", "insert", lambda of: message(of, 3, reward=FOUR), {}),
        ("3 transitions and 2 priorities", "actor 0", "insert", lambda of: message(of, 3, [1, 1]), {}),
        ("priorities must be finite", "actor 0", "insert", lambda of: message(of, 3, [1, -1, 1]), {}),
        ("priorities must be finite", "actor 0", "insert", lambda of: message(of, 3, [1, np.nan, 1]), {}),
        ("NaN or infinity in reward", "actor 0", "insert", lambda of: message(of, 3, reward=INFINITE), {}),
        ("41 transitions do not fit", "actor 0", "insert", lambda of: message(of, 41), {}),
        ("replay.insert carries", "actor 0", "insert", lambda of: message(of, MOST + 1), {}),
        ("replay.insert carries", "actor 0", "insert", lambda of: message(of, 3)[1:], {}),
        ("replay.insert carries", "actor 0", "insert", lambda of: [each.double() for each in message(of, 3)], {}),
        ("asked for 0", "worker 0", "sample", lambda of: [], {"count": 0, "beta": 0.4, "version": 0}),
        ("asked for 4097", "worker 0", "sample", lambda of: [], {"count": 4097, "beta": 0.4, "version": 0}),
        ("has count=", "worker 0", "sample", lambda of: [], {"count": 1 << 60, "beta": 0.4, "version": 0}),
        ("has count=-3", "worker 0", "sample", lambda of: [], {"count": -3, "beta": 0.4, "version": 0}),
        ("has beta=", "worker 0", "sample", lambda of: [], {"count": 3, "beta": float("inf"), "version": 0}),
        ("beta must be between", "worker 0", "sample", lambda of: [], {"count": 3, "beta": -300.0, "version": 0}),
        ("3 keys and 2 priorities", "worker 0", "update", lambda of: [KEYS, ONES[:2]], {}),
        ("priorities must be finite", "worker 0", "update", lambda of: [KEYS, -ONES], {}),
        ("priorities must be finite", "worker 0", "update", lambda of: [KEYS, ONES * np.nan], {}),
        ("no method", "worker 0", "clear", lambda of: [], {}),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused_and_changes_nothing(any_replay, says, caller, method, tensors, fields):
    replay, layout = any_replay
    refused(replay, says, caller, method, *tensors(layout), **fields)


@pytest.mark.parametrize("reference", [-1, 4, 2**31 - 1])
def test_references_to_frames_that_a_message_does_not_have_are_refused(frames, reference):
    wrong = np.zeros((3, 2), np.int32)
    wrong[1, 1] = reference
    refused(
        frames,
        "4 frames, and observation refers to others",
        "actor 0",
        "insert",
        *message(FRAMED, 3, observation=wrong),
    )


def test_half_a_frame_is_refused(frames):
    tensors = message(FRAMED, 3)
    refused(frames, "an insertion has 3 frames", "actor 0", "insert", *tensors[:-1], tensors[-1][:-1])


def test_priorities_of_keys_that_are_not_held_change_nothing():
    replay = Replay(PLAIN, 4, seed=0)
    service = ReplayService(SimpleNamespace(), replay, RateLimiter(1.0, 1, 1e9), trim_every=1, actors=["actor 0"])
    values = {"observation": np.ones((8, 2), np.float32), "reward": np.ones(8, np.float32), "version": np.zeros(8, int)}
    for part in (slice(4), slice(4, 8)):
        replay.insert({name: column[part] for name, column in values.items()}, None)
    before = service.state().cloned()
    keys = torch.tensor([0, 3, 8, -1, 2**62, -(2**63)])
    service.handle(Call("worker 0", "update", {}, (keys, torch.full((6,), 1e30))))
    assert same(service.state(), before)


def test_a_model_is_pulled_by_actors_only_and_by_a_count():
    assert ModelService.protocol["pull"].callers == ("actor",)
    field = ModelService.protocol["pull"].fields["at_least"]
    assert not any(field.holds(value, "actor 0") for value in (-1, 0.5, "0", None, 1 << 60))
    with raising(Refused, "method"):
        ModelService(SimpleNamespace()).handle(Call("actor 0", "push", {}, ()))


def test_a_flood_of_figures_is_refused():
    tracker = CompanionTracker(SimpleNamespace(deployment=SimpleNamespace(nodes=())), str)
    with raising(Refused, "most 100"):
        tracker.report(Call("actor 0", "figures", {"figures": dict.fromkeys(map(str, range(MOST_FIGURES + 1)), 1)}, ()))
    assert tracker.figures() == {}
