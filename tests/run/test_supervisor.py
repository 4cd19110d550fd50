"""What follows from failures and freezes, without processes."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from support.wording import raising

from dure.core.deployment import SERVER, WORKER, Deployment, NodeId, NodeSpec, WhenLost
from dure.errors import DureError
from dure.run.failures import FailureTracker
from dure.run.replacement import Replacements
from dure.run.roster import ProcessRoster, RunProgress
from dure.run.supervisor import Supervisor
from dure.runtime.launch.fork_server import LOADER as FORK_SERVER
from dure.runtime.wire import Loss


class Recorder:
    """Notes the calls of any method."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, method):
        return lambda *given: self.calls.append((method, *given))


class Given:
    """A supervisor of two workers and a server, and what it acts on."""

    def __init__(self, worker_lost=WhenLost.GO_ON, *, in_place=False, graph=None, begun=True):
        nodes = [NodeSpec(NodeId(WORKER, rank), None, worker_lost) for rank in range(2)]
        deployment = Deployment((*nodes, NodeSpec(NodeId(SERVER, 0), None, WhenLost.ROLL_BACK)))
        topology = SimpleNamespace(in_place=in_place, graph=graph)
        every = {"reports": lambda number: True, "replica_of": lambda number: number}
        setup = SimpleNamespace(
            deployment=deployment,
            topology=topology,
            batch_sizes=(8, 8),
            config=SimpleNamespace(frozen_after=3.0),
            replaces=True,
            **every,
        )
        self.now = 1.0
        self.roster = ProcessRoster(deployment)
        self.roster.ready |= self.roster.expected
        self.roster.incarnations |= dict.fromkeys(self.roster.expected, 0)
        self.progress = RunProgress(setup, self.roster)
        self.launcher, self.commands, self.restarts = Recorder(), Recorder(), Recorder()
        self.launcher.exited = {}
        self.restarts.awaited = []
        self.failures = FailureTracker(self.launcher, Recorder(), "ssp", deployment, roster=self.roster, folder=None)
        self.frozen, self.without = [], []
        self.supervisor = Supervisor(
            setup=setup,
            launcher=self.launcher,
            roster=self.roster,
            progress=self.progress,
            commands=self.commands,
            failures=self.failures,
            restarts=self.restarts,
            liveness=SimpleNamespace(look=lambda watched: None, frozen=self._frozen, described=lambda watched: ""),
            begun=SimpleNamespace(done=begun),
            now=lambda: self.now,
            go_on_without=self.without.append,
            companions=Recorder(),
            replacements=Replacements(self.progress.steps),
        )

    def _frozen(self, watched):
        return [name for name in self.frozen if name in watched]

    def freeze(self, *names):
        self.frozen = list(names)
        self.supervisor.look_for_frozen()


def loss(peer="worker 1", *, incoming=True, finished=False, incarnation=0):
    return SimpleNamespace(
        peer=peer, incoming=incoming, finished=finished, incarnation=incarnation, reason="reset by peer"
    )


def test_the_fake_loss_has_fields_of_the_real_one():
    assert {"peer", "incoming", "finished", "incarnation", "reason"} <= set(Loss.__slots__)


def test_others_go_on_without_a_worker_that_failed():
    given = Given()
    given.supervisor.disconnected(loss())
    given.supervisor.failed("worker 1", "exit status 1")  # noticed a second time
    assert given.without == ["worker 1"]
    assert given.roster.failed == {"worker 1": "reset by peer"}
    assert given.progress.totals.failures_survived == 1


@pytest.mark.parametrize("ended", [{"finished": True}, {"incoming": False}, {"incarnation": -1}])
def test_a_connection_that_ends_in_order_or_of_an_earlier_incarnation_is_no_failure(ended):
    given = Given()
    given.supervisor.disconnected(loss(**ended))
    assert not given.roster.failed


def test_the_clock_hears_of_a_worker_that_failed_before_it_was_ready():
    given = Given()
    given.roster.ready.discard("worker 1")
    given.supervisor.failed("worker 1", "exit status 1")
    assert given.commands.calls == [("tell_clock", "lost", "worker 1")]


def test_a_worker_that_others_need_is_not_survived():
    given = Given(WhenLost.END)
    given.supervisor.failed("worker 1", "exit status 1")
    assert given.without == []
    assert given.progress.totals.failures_survived == 0


def test_a_server_that_failed_may_be_started_again():
    given = Given()
    given.supervisor.failed("server 0", "exit status 1")
    assert given.restarts.calls == [("failed", "server 0", 1.0)]


def test_a_frozen_worker_is_evicted_and_not_killed():
    given = Given(graph="ring")
    given.freeze("worker 1")
    given.freeze("worker 1")
    assert given.roster.evicted == {"worker 1": "frozen: no heartbeat for 3 s"}
    assert given.without == ["worker 1"]
    assert given.progress.totals.failures_survived == 1
    assert given.commands.calls == [("tell_neighbors", "worker 1"), ("tell_clock", "frozen", "worker 1")]
    assert not given.roster.failed


@pytest.mark.parametrize("options", [{"in_place": True}, {"begun": False}, {"worker_lost": WhenLost.END}])
def test_a_frozen_worker_that_could_do_harm_later_is_killed(options):
    given = Given(**options)
    given.freeze("worker 1")
    assert given.launcher.calls == [("signal", "worker 1", signal.SIGKILL)]
    assert given.failures.reasons == {"worker 1": "frozen: no heartbeat for 3 s"}
    assert "worker 1" in given.roster.failed


def test_the_last_worker_that_freezes_ends_the_run():
    given = Given()
    given.supervisor.failed("worker 0", "exit status 1")
    given.freeze("worker 1")  # the other may be started again
    given.launcher.exited, given.now = {"worker 0": 1}, 2.0
    given.supervisor.due()
    with raising(DureError, "worker 1,"):
        given.freeze("worker 1")


def test_the_last_worker_that_freezes_ends_a_run_that_starts_none_again():
    given = Given()
    given.supervisor.setup.replaces = False
    given.supervisor.failed("worker 0", "exit status 1")
    with raising(DureError, "worker 1,"):
        given.freeze("worker 1")


def test_the_last_worker_that_dies_beside_a_frozen_one_ends_a_run_that_starts_none_again():
    given = Given()
    given.supervisor.setup.replaces = False
    given.freeze("worker 1")
    given.supervisor.failed("worker 0", "exit status 1")
    with raising(DureError, "worker 1,"):
        given.freeze("worker 1")


def test_a_worker_that_makes_no_progress_is_waited_for_when_the_others_have_died():
    given = Given()
    given.supervisor.setup.replaces = False
    given.supervisor.evicted_by_clock("worker 1")
    given.supervisor.failed("worker 0", "exit status 1")
    given.freeze()


def test_the_fork_server_is_watched_while_it_may_have_to_start_processes():
    Given().freeze(FORK_SERVER)
    with raising(DureError, "process"):
        Given(begun=False).freeze(FORK_SERVER)


def test_a_worker_that_the_clock_evicts_is_gone_on_without_once():
    given = Given()
    given.supervisor.evicted_by_clock("worker 1")
    given.supervisor.evicted_by_clock("worker 1")
    assert given.without == ["worker 1"]
    assert given.roster.evicted == {"worker 1": "no progress while others waited for it"}


# ---- workers that are started again


@pytest.mark.parametrize(("status", "again"), [(-signal.SIGKILL, ["worker 1"]), (1, []), (0, [])])
def test_a_worker_that_was_killed_is_started_again_and_one_that_ended_itself_is_not(status, again):
    given = Given()
    given.supervisor.disconnected(loss())
    given.now = 2.0
    assert given.supervisor.due() == []  # its exit is not known yet
    assert list(given.supervisor.replacements.awaited) == ["worker 1"]
    given.launcher.exited = {"worker 1": status}
    assert given.supervisor.due() == again
    assert not given.supervisor.replacements.awaited


def test_a_worker_whose_exit_nobody_reports_is_given_up():
    given = Given()
    given.supervisor.disconnected(loss())
    given.now = 1000.0
    assert given.supervisor.due() == []
    assert not given.supervisor.replacements.awaited


def test_nobody_is_started_again_once_nobody_has_the_model():
    given = Given()
    given.roster.servers = []
    for name in ("worker 0", "worker 1"):
        given.supervisor.disconnected(loss(name))
    given.launcher.exited = dict.fromkeys(("worker 0", "worker 1"), -signal.SIGKILL)
    given.now = 1000.0
    assert given.supervisor.due() == []


def test_a_worker_that_starts_while_the_last_one_with_the_model_dies_is_killed():
    given = Given()
    given.roster.servers = []
    given.supervisor.disconnected(loss("worker 0"))
    given.launcher.exited, given.now = {"worker 0": -signal.SIGKILL}, 2.0
    assert given.supervisor.due() == ["worker 0"]
    given.failures.restarted("worker 0")
    given.roster.admit("worker 0")
    given.supervisor.disconnected(loss("worker 1"))
    assert given.supervisor.due() == []
    assert given.launcher.calls == [("signal", "worker 0", signal.SIGKILL)]
    assert given.roster.failed.keys() == {"worker 0", "worker 1"}
    assert not given.supervisor.replacements.awaited


def test_nobody_is_started_again_before_the_run_has_begun():
    given = Given(begun=False)
    given.supervisor.disconnected(loss())
    assert not given.supervisor.replacements.awaited
