"""Another user of the machine, against live runs: no forged action is let in, and the results are as without it.

The attacker knows all but the key: names, ports, methods, the path of the store. It runs as the user "nobody".
"""

import contextlib
import encodings.idna  # noqa: F401  (another user may not read it once it is wanted)
import json
import os
import re
import socket
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.flood import flood, sockets_of
from support.raw_caller import frame
from support.real_runs import Trial, configured

from dure.runtime.wire.frame import Kind
from dure.runtime.wire.reactor import unix_name
from dure.runtime.wire.seals import NONCE_NBYTES, PROOF_NBYTES, REFUSAL, Prover

NOBODY = 65534
POISON = torch.full((4810,), 1e30).numpy().tobytes()
PUSH = {"worker": 0, "incarnation": 0, "seq": 1, "base": 0, "weight": 1.0, "ordered": False}

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)


@dataclass
class Action:
    """A call that `caller` is said to make at the process `at`."""

    at: str
    caller: str
    service: str
    method: str
    fields: dict = field(default_factory=dict)
    payload: bytes = b""
    incarnation: int = 0

    def frames(self, run, seals):
        name, rank = self.caller, int(self.caller.split()[1]) if " " in self.caller else 0
        hello = {"job": run, "name": name, "rank": rank, "incarnation": self.incarnation, "about": {}}
        hello |= {"maps": True, "trusts": True}
        tensors = [["float32", len(self.payload) // 4]] if self.payload else []
        meta = {"service": self.service, "method": self.method, "fields": self.fields, "tensors": tensors}
        return frame(Kind.HELLO, hello, seals=seals) + frame(
            Kind.REQUEST, meta, self.payload, rank=rank, request=1, seals=seals
        )


def actions(folder):
    return {
        "poisonous push": Action("server 0", "worker 0", "shard", "push", PUSH, POISON),
        "save by the driver": Action("server 0", "driver", "process", "save", {"draft": str(folder)}),
        "high incarnation": Action("server 0", "worker 0", "shard", "status", incarnation=1000),
        "high incarnation at the driver": Action("driver", "worker 0", "driver", "slowest", incarnation=1000),
        "failed": Action(
            "driver", "worker 0", "driver", "failed", {"kind": "UsageError", "message": "forged", "refused": 0}
        ),
        "done": Action("driver", "worker 0", "driver", "done", {"steps": 1}, POISON),
        "a field missing": Action("driver", "worker 0", "driver", "progress"),
    }


def heard(sock, data):
    """Send `data`; all that comes back."""
    said = b""
    with sock, contextlib.suppress(ConnectionError):
        sock.settimeout(20)
        sock.sendall(data)
        while piece := sock.recv(65536):
            said += piece
    return said


def attack(run, ports, store, folder):
    """What becomes of each action, as the attacker hears it."""
    found = {}
    for what, action in actions(folder).items():
        address = ("127.0.0.1", ports.get(action.at, ports["worker 0"]))
        found[f"{what}, without a key"] = heard(socket.create_connection(address), action.frames(run, None))
        wrong = Prover(bytes(32), calling=True)
        wrong.meet(bytes(NONCE_NBYTES))
        proof = frame(Kind.PROOF, wrong.mine + bytes(PROOF_NBYTES))
        data = proof + action.frames(run, wrong.seals()[0])
        found[f"{what}, with another key"] = heard(socket.create_connection(address), data)
    with socket.socket(socket.AF_UNIX) as near:
        near.connect(unix_name(ports["driver"]))
        found["unix socket"] = heard(near, actions(folder)["failed"].frames(run, None))
    if store is not None:
        try:
            Path(store).read_bytes()
            found["store"] = b"reached"
        except OSError as error:
            found["store"] = error.strerror.encode()
    return {key: said.decode("latin1") for key, said in found.items()}


class Attacker:
    """A child process of another user, which runs `attack` on what it knows; `found` once it has ended."""

    def __init__(self, attack, *known):
        self._read, write = os.pipe()
        self.found = None
        self._said = b""
        with warnings.catch_warnings():  # the child takes no lock that a thread of this process may hold
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                os.write(write, json.dumps(attack(*known)).encode())
                status = 0
            except BaseException:  # noqa: BLE001  (this process is the test's own)
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(write)
        os.set_blocking(self._read, False)

    def ended(self):
        if self.found is not None:
            return True
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self._read, 1 << 20)
            self._said += piece
            if not piece:
                os.close(self._read)
                os.waitpid(self.pid, 0)
                self.found = json.loads(self._said)
        return self.found is not None


def listening(pids):
    """Addresses, in hexadecimal, of the sockets of `pids` at which anybody is heard."""
    inodes = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
                if found:
                    inodes[found[1]] = pid
    heard_at = []
    for table, states in (("tcp", ["0A"]), ("tcp6", ["0A"]), ("udp", ["07", "01"]), ("udp6", ["07", "01"])):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[9] in inodes and columns[3] in states:
                heard_at.append((table, columns[1].partition(":")[0]))
    return heard_at


class Observed:
    """A real run of a strategy, undisturbed or attacked, and what was seen of it from outside."""

    def __init__(self, strategy, fork_server, folder, *, attacked):
        folder.mkdir()
        options = {"workers": 2, "steps": 20, "checkpoint_every": 10, "out": folder / "run"}
        self.trial = Trial(configured("digits-mlp", strategy, **options))
        self.attacker = None
        self.addresses, self.shown = [], b""
        self._attacked, self._victim = attacked, folder / "victim"
        self._victim.mkdir(mode=0o700)
        self.outcome = self.trial.run(self._look, fork_server=fork_server)

    def _look(self, trial):
        driver = trial.driver
        if self.addresses:
            return
        pids = [os.getpid(), *trial.pids()]
        self.addresses = listening(pids)
        for pid in trial.pids():
            self.shown += Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        if not self._attacked:
            return
        ports = {"driver": driver.address[1], **{name: port for name, (_, port) in driver.roster.places.items()}}
        store = driver.store and driver.store.place[0]
        attacker = self.attacker = Attacker(attack, driver.run_name, ports, store, self._victim)
        all_finished = driver._all_finished
        driver._all_finished = lambda: attacker.ended() and all_finished()

    @property
    def saved(self):
        return [*self._victim.iterdir()]


@pytest.fixture(scope="module", params=["bsp ps", "bsp"])
def runs(request, fork_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    calm = Observed(request.param, fork_server, folder / "calm", attacked=False)
    attacked = os.geteuid() == 0
    return calm, Observed(request.param, fork_server, folder / "attacked", attacked=attacked) if attacked else calm


@pytest.mark.sampled(1)
@needs_root
def test_all_forged_actions_are_refused_and_hear_nothing_of_the_run(runs):
    found = {what: said.encode("latin1") for what, said in runs[1].attacker.found.items()}
    ports = runs[1].trial.driver.roster.places
    assert found["unix socket"] == b"", "the system tells that its user is another"
    driver = runs[1].trial.driver
    names = [
        driver.run_name,
        "driver",
        "worker",
        "server",
        "digits",
        "shard",
        *(str(port) for _, port in ports.values()),
    ]
    calls = {what: said for what, said in found.items() if what.endswith("key")}
    assert len(calls) == 14
    for what, said in calls.items():
        assert REFUSAL in said, (what, said)
        assert not any(name.encode() in said.replace(REFUSAL, b"") for name in names), (what, said)
    assert driver.node.wire.damaged + driver.node.wire.refused >= 2 * 4


@pytest.mark.long
@needs_root
def test_an_attacked_run_has_the_result_of_an_undisturbed_one(runs):
    calm, attacked = (each.outcome for each in runs)
    assert torch.equal(calm.params, attacked.params)
    assert (attacked.notes["deaths"], attacked.notes["evicted"], attacked.notes["unfinished"]) == ({}, {}, {})
    assert attacked.totals.counts["updates_refused"] == 0
    assert not runs[1].saved


@needs_root
def test_the_store_of_the_collectives_is_out_of_reach(runs):
    reached = runs[1].attacker.found.get("store", "")
    assert bool(reached) == runs[1].trial.setup.topology.uses_engine
    assert reached in ("", "Permission denied", "No such file or directory")


def test_nothing_listens_but_on_the_loopback(runs):
    loopback = ("0100007F", "0000000000000000FFFF00000100007F")
    assert len(runs[0].addresses) >= 3
    assert [each for each in runs[0].addresses if each[1] not in loopback] == []


def test_the_key_is_in_no_argument_no_variable_and_no_file(runs, capfd):
    run = runs[0]
    key = run.trial.driver.credentials.key
    written = [path.read_bytes() for path in run.trial.config.out.rglob("*") if path.is_file()]
    assert run.shown
    assert written
    for text in (run.shown, *written, *(said.encode() for said in capfd.readouterr())):
        assert key not in text
        assert key.hex().encode() not in text
    assert key.hex() not in repr(run.trial.driver.credentials)


@pytest.mark.long
@needs_root
@pytest.mark.parametrize(
    ("seconds", "steps", "floods", "warn_after"),
    [(3.0, 150, 1, 4.0), pytest.param(60.0, 6000, 3, None, marks=pytest.mark.soak)],
)
@pytest.mark.timeout(900)
def test_a_flood_of_garbage_makes_no_process_look_frozen(seconds, steps, floods, warn_after, fork_server, caplog):
    """Two processes of another user fill whatever buffer they reach, while the run goes on."""
    for _ in range(floods):
        attackers = []

        def act(trial, attackers=attackers):
            if attackers or min(map(trial.driver.steps, trial.driver.roster.workers)) < 10:
                return
            targets = sockets_of([os.getpid(), *trial.pids()])
            attackers += [Attacker(flood, targets, seconds) for _ in range(2)]
            all_finished = trial.driver._all_finished
            trial.driver._all_finished = lambda: sum(each.ended() for each in attackers) == 2 and all_finished()

        options = {"workers": 2, "steps": steps, "frozen_after": 6.0, "warn_after": warn_after}
        trial = Trial(configured("waits_now_and_then", "downpour ps", **options))
        outcome = trial.run(act, fork_server=fork_server)
        assert min(each.found["tcp"] for each in attackers) > 100, "nothing was flooded"
        assert {each.found["udp"] for each in attackers} == {0}, "a datagram of anybody reaches the run"
        assert "frozen" not in caplog.text
        assert (outcome.notes["deaths"], outcome.notes["evicted"], outcome.notes["unfinished"]) == ({}, {}, {})
        assert {said["done"] for said in trial.driver.roster.finished.values()} == {steps}
