"""The driver's decisions on the generations of a group, without processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.raw_caller import CREDENTIALS

from dure.core.deployment import WORKER, Deployment, NodeId, NodeSpec, WhenLost
from dure.core.node import Call
from dure.errors import DureError, PeerLost
from dure.run.generations import MOST_IN_VAIN, TOO_LATE, Generations
from dure.run.roster import ProcessRoster
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity


class Given:
    """The generations of a run of four workers, and what workers tell the driver; `told` are those that are over."""

    def __init__(self):
        self.node = ProcessNode(Identity("job", "driver"), CREDENTIALS)
        workers = [NodeSpec(NodeId(WORKER, rank), None, WhenLost.RE_FORM) for rank in range(4)]
        self.roster = ProcessRoster(Deployment(tuple(workers)))
        self.told: list[tuple[str, int]] = []
        self.checkpoints = SimpleNamespace(is_writing=False, interrupt=lambda: None)
        commands = SimpleNamespace(break_up=lambda name, number: self.told.append((name, number)))
        self.generations = Generations(self.node, self.roster, commands, self.checkpoints)
        self.answers = {}

    def close(self):
        self.node.wire.close()

    def call(self, method, rank, **fields):
        answer = getattr(self.generations, method)(Call(f"worker {rank}", method, fields, ()))
        if method != "formed":
            self.answers[rank] = self.node.spawn(answer, method)
            self.node.loop.run_ready()

    def stop(self, *ranks, steps=0, clock=None, fresh=False, reason=None):
        clock = steps if clock is None else clock
        for rank in ranks:
            self.call("stopped", rank, steps=steps, clock=clock, fresh=fresh, reason=reason)

    def form(self, *ranks):
        for rank in ranks:
            self.call("formed", rank, generation=self.answer(rank)["generation"])

    def answer(self, rank):
        """The driver's last answer to a worker; None while it waits."""
        self.node.loop.run_ready()
        return self.answers[rank].result().fields if self.answers[rank].done else None

    def lose(self, rank):
        self.roster.failed[f"worker {rank}"] = "a test"
        self.generations.lost(f"worker {rank}")

    def begin(self):
        self.stop(0, 1, 2, 3)
        self.form(0, 1, 2, 3)


@pytest.fixture
def given():
    one = Given()
    yield one
    one.close()


def test_the_first_generation_has_all_workers_and_no_source(given):
    given.stop(0, 1, 2)
    assert given.answer(0) is None
    given.stop(3)
    expected = {"generation": 0, "ranks": [0, 1, 2, 3], "source": None}
    assert [given.answer(rank) for rank in range(4)] == [expected] * 4


def test_after_a_failure_all_others_are_told_and_the_most_advanced_of_the_lowest_rank_is_the_source(given):
    given.begin()
    given.lose(3)
    assert given.told == [("worker 0", 0), ("worker 1", 0), ("worker 2", 0)]
    given.stop(0, steps=7)
    given.stop(1, 2, steps=8)
    assert given.answer(2) == {"generation": 1, "ranks": [0, 1, 2], "source": 1}
    assert given.generations.history[-1]["step"] == 8


def test_a_copy_of_the_source_counts_no_gradients_of_its_round(given):
    """Models are averaged at every tenth step: worker 0 is a round behind, and worker 3 is new."""
    given.begin()
    given.lose(3)
    given.roster.failed.clear()
    given.stop(3, fresh=True)
    given.stop(0, steps=10, clock=20)
    given.stop(1, 2, steps=20, clock=30)
    assert given.answer(3) == {"generation": 1, "ranks": [0, 1, 2, 3], "source": 1}
    assert given.generations.history[-1]["copies"] == [0, 3]
    assert [given.generations.gradients(step) for step in (20, 25, 30, 40)] == [80, 90, 100, 140]


def test_a_failure_while_the_group_is_formed_leads_to_another_generation(given):
    given.begin()
    given.lose(3)
    given.stop(0, 1, 2, steps=7)
    given.form(0)
    given.lose(2)
    assert given.told[3:] == [("worker 0", 1), ("worker 1", 1)]
    given.stop(0, 1, steps=7)
    assert given.answer(0) == {"generation": 2, "ranks": [0, 1], "source": None}


def test_a_newcomer_waits_until_the_group_is_formed_and_gets_the_model(given):
    given.begin()
    given.lose(0)
    given.stop(1, 2, 3, steps=7)
    given.roster.failed.clear()
    given.stop(0, fresh=True)
    given.form(1, 2)
    assert ("worker 1", 1) not in given.told
    given.form(3)
    assert given.told[3:] == [("worker 1", 1), ("worker 2", 1), ("worker 3", 1)]
    given.stop(1, 2, 3, steps=9)
    assert given.answer(0) == {"generation": 2, "ranks": [0, 1, 2, 3], "source": 1}


def test_newcomers_alone_cannot_go_on(given):
    given.begin()
    given.stop(0, steps=7)
    given.roster.failed.clear()
    for rank in range(4):
        given.lose(rank)
    given.roster.failed.clear()
    given.stop(1, fresh=True)
    given.stop(0, 2, 3, fresh=True)
    with pytest.raises(DureError, match="every worker that had the model has failed"):
        given.generations.check()


def test_a_worker_that_is_through_stays_until_all_are(given):
    given.begin()
    for rank in range(3):
        given.call("through", rank)
    assert given.answer(0) is None
    given.lose(3)
    assert [given.answer(rank) for rank in range(3)] == [{"over": False}] * 3
    given.stop(0, 1, 2, steps=9)
    given.form(0, 1, 2)
    for rank in range(3):
        given.call("through", rank)
    assert [given.answer(rank) for rank in range(3)] == [{"over": True}] * 3


def test_a_newcomer_that_comes_after_the_end_is_not_waited_for(given):
    given.begin()
    given.lose(3)
    given.stop(0, 1, 2, steps=7)
    given.form(0, 1, 2)
    given.roster.failed.clear()
    for rank in range(3):
        given.call("through", rank)
    assert given.generations.over
    assert given.roster.evicted == {"worker 3": TOO_LATE}


def test_no_generation_ends_while_a_checkpoint_is_written(given):
    given.begin()
    given.checkpoints.is_writing = True
    given.lose(3)
    assert given.told == []
    given.checkpoints.is_writing = False
    given.generations.look()
    assert len(given.told) == 3


def test_members_that_stop_again_and_again_without_a_failure_end_the_run(given):
    given.begin()
    for _ in range(MOST_IN_VAIN):
        given.stop(0, 1, 2, 3, steps=7, reason="worker 0 waited: the sizes differ")
        given.form(0, 1, 2, 3)
        given.generations.check()
    given.stop(0, 1, 2, 3, steps=7, reason="worker 0 waited: the sizes differ")
    given.form(0, 1, 2, 3)
    given.stop(0, 1, 2, 3, steps=7)
    with pytest.raises(PeerLost, match=r"^worker 0 waited: the sizes differ"):
        given.generations.check()


def test_the_gradients_in_a_model_are_those_of_the_members_of_each_step(given):
    given.generations.history = [
        {"step": 0, "ranks": [0, 1, 2, 3], "copies": []},
        {"step": 10, "ranks": [0, 1, 2], "copies": []},  # its only step is lost with rank 0, the one that has it
        {"step": 9, "ranks": [1, 2], "copies": []},
    ]
    assert [given.generations.gradients(step) for step in (0, 9, 12)] == [0, 36, 42]
