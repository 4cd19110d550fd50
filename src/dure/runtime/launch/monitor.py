"""Heartbeats between ranks: each has a connection to rank 0 for them alone, which asks for the key of the run.

    rank r               ── alive: reason, ours, other ────────> rank 0
    worker r, server s   ── beat: number, clock, waiting ──────> rank 0 ──> `BeatPipe` of the launcher
                         <── reason ──

Rank 0 notices other ranks that are silent for a long time: they are frozen or have failed. The others notice rank 0.
It notices ranks that wait for each other, too: some in dure (`ours`), the others in collectives of the loop (`other`).
Each notices stopped server processes on its machine. The first reason reaches all ranks with a heartbeat or its reply,
so that all ranks end with the same message. A rank that ends closes its connection in good order.

A connection carries no tensors, so a heartbeat does not wait for them, and no other process can displace it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from dure.core.node import Reply
from dure.core.protocol import COUNT, NODES, TEXT, TRUTH, Method, check
from dure.core.text import log
from dure.errors import PeerLost, Refused, RemoteError
from dure.runtime.heartbeat import PERIOD_SECONDS, Silence, is_stopped
from dure.runtime.launch.waits import Wait, WatchedThread
from dure.runtime.wire import Identity, Request, Wire
from dure.runtime.wire.reactor import retry_soon

if TYPE_CHECKING:
    from dure.core.node import Call, TensorSpec
    from dure.runtime.launch.rendezvous import Rendezvous
    from dure.runtime.wire import Credentials, HostCallbacks, Loss, Respond

JOB = "heartbeats"
"""Name of the service, of its job on the wire, and of the note with its address."""

NAMED = 3
"""A silent rank is logged after this part (one third) of the time after which it ends the training."""

STORE = "the store where the ranks meet, and so rank 0 or torchrun's agent,"
"""Name of the frozen processes if the store does not answer."""

RANK_0 = "rank 0"

CONNECT_SECONDS = 5.0
"""Time limit of one greeting; the next heartbeat repeats it."""

CLOSE_SECONDS = 0.5
"""Time limit for the other ends to close their connections."""


class HeartbeatCaller:
    """The connection of the process `name` to rank 0's monitor at `address`. One thread at a time may use it.

    `heard` gets the fields of each reply. A heartbeat is dropped while the connection opens, or the last has no reply.
    """

    def __init__(
        self,
        name: str,
        address: Sequence[Any],
        credentials: Credentials,
        heard: Callable[[Mapping[str, Any]], None] = lambda fields: None,
        host: HostCallbacks | None = None,
    ) -> None:
        self.wire = Wire(Identity(JOB, name), host, credentials=credentials)
        self._host, self._port = address
        self._heard = heard
        self._busy = False

    def send(self, method: str, seconds: float, **fields: Any) -> None:
        """Send a heartbeat, and wait up to `seconds` for its reply."""
        deadline = time.monotonic() + seconds
        if not self._busy:
            self._busy = True
            if self.wire.connected(RANK_0):
                self.wire.call(RANK_0, Request(JOB, method, fields=fields), self._replied)
            else:
                self._open()
        while self._busy and (left := deadline - time.monotonic()) > 0:
            self.wire.poll(left)

    def _open(self) -> None:
        try:
            self.wire.open(RANK_0, self._host, self._port, self._replied, CONNECT_SECONDS)
        except RemoteError as error:
            self._replied(error)

    def _replied(self, answer: Reply | RemoteError | None) -> None:
        self._busy = False
        if isinstance(answer, Reply):
            self._heard(answer.fields)


class HeartbeatService:
    """The callbacks of a wire that receives heartbeats: it serves `protocol` at the process that is `called` so."""

    protocol: ClassVar[Mapping[str, Method]]
    called: ClassVar[str]

    def heard(self, call: Call) -> str:
        """Take a heartbeat; returns the reason why the run ends, if it does."""
        raise NotImplementedError

    def admit(self, caller: Identity) -> str | None:
        return None

    def expects(self, service: str, method: str) -> Sequence[TensorSpec]:
        if service != JOB or method not in self.protocol:
            raise Refused(f"{self.called} takes heartbeats here, and was asked for {method!r} of {service!r}.")
        return ()

    def request(self, service: str, call: Call, respond: Respond) -> None:
        try:
            check(service, self.protocol[call.method], call)
        except Refused as error:
            respond(error)
            return
        respond(Reply({"reason": self.heard(call)}))


class BeatReceiver(HeartbeatService):
    """Receives the heartbeats of processes of any machine at `address`, and passes them on to `beat`.

    It has no thread: `poll` receives what has come.
    """

    protocol: ClassVar[Mapping[str, Method]] = {
        "beat": Method(NODES, {"number": COUNT, "clock": COUNT, "waiting": TRUTH})
    }
    called = "the driver"

    def __init__(self, interface: str, credentials: Credentials, beat: Callable[[int, int, bool], None]) -> None:
        self._beat = beat
        self._wire = Wire(Identity(JOB, RANK_0), self, credentials=credentials)
        self.address = (interface, self._wire.listen(interface))

    def poll(self) -> None:
        self._wire.poll(0)

    def close(self) -> None:
        self._wire.close(0)

    def heard(self, call: Call) -> str:
        self._beat(call.fields["number"], call.fields["clock"], call.fields["waiting"])
        return ""

    def lost(self, loss: Loss) -> None:
        """A process connects again with its next heartbeat."""


class RankMonitor(HeartbeatService):
    """Exchanges heartbeats with the other ranks of `rendezvous`, until `close`. All ranks make one at the same time.

    `check` raises `PeerLost` once a rank, or the process of a server, has been silent for `frozen_after` seconds.
    Rank 0 judges the other ranks, unless a driver does so: it gets their heartbeats by `beat`. `servers` gives the ids
    of the server processes that this rank has started. `address`: where rank 0 listens. `reachable`: the store answers.
    """

    protocol: ClassVar[Mapping[str, Method]] = {
        "alive": Method(fields={"reason": TEXT, "ours": TEXT, "other": TEXT}),
        "beat": Method(NODES, {"number": COUNT, "clock": COUNT, "waiting": TRUTH}),
    }
    called = RANK_0

    def __init__(
        self,
        rendezvous: Rendezvous,
        credentials: Credentials,
        frozen_after: float,
        beat: Callable[[int, int, bool], None] | None = None,
    ) -> None:
        self.servers: Callable[[], Mapping[str, int]] = dict
        self.reachable = True
        self._beat = beat
        self._frozen_after = frozen_after
        self._period = min(PERIOD_SECONDS, frozen_after / 8)
        self._silence = Silence()
        self._thread_of_loop = WatchedThread()
        self._waits: dict[str, Wait | None] = {}
        self._others = rendezvous.place.world_size - 1
        self._named: set[str] = set()
        self._rounds = self._seen = 0
        self._store_silence = Silence()
        self._store_silence.heard(STORE)
        self._reason = ""
        self._store: Any = None
        self._wire: Wire | None = None
        self._caller: HeartbeatCaller | None = None
        if rendezvous.place.world_size > 1:
            self._meet(rendezvous, credentials)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dure monitor", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `PeerLost` if a rank or a server is frozen. A waiting thread calls this about once a second."""
        # The thread makes no further round while the store does not answer it (`_look`): it cannot judge that itself.
        self._store_silence.pass_time()
        if self._rounds != self._seen:
            self._seen = self._rounds
            self._store_silence.heard(STORE)
        if not self._reason and self._store_silence.seconds(STORE) >= self._frozen_after:
            self.reachable = False
            self._reason = self._sentence(STORE)
        if self._reason:
            raise PeerLost(self._reason)

    def close(self) -> None:
        """Stop the heartbeats: this rank has ended."""
        self._closing.set()
        if self._wire is not None:
            self._wire.wake()  # the thread may wait in `poll`
        # With a time limit: the thread may wait for a store that does not answer.
        self._thread.join(self._period + CLOSE_SECONDS)

    # ---- the callbacks of the wire

    def heard(self, call: Call) -> str:
        if call.method == "beat" and self._beat is not None:
            self._beat(call.fields["number"], call.fields["clock"], call.fields["waiting"])
        elif call.method == "alive" and self._beat is None:
            ours, other = call.fields["ours"], call.fields["other"]
            self._waits[call.caller] = Wait(bool(ours), ours or other) if ours or other else None
            self._hear(call.caller, call.fields["reason"])
        return self._reason

    def lost(self, loss: Loss) -> None:
        # A rank at its end closes its connection in order. After another loss it may connect again: it stays silent.
        if loss.finished:
            self._silence.forget(loss.peer)

    # ---- the thread

    def _meet(self, rendezvous: Rendezvous, credentials: Credentials) -> None:
        """Make the connection between rank 0 and the others."""
        rank, interface = rendezvous.place.rank, rendezvous.place.interface
        # A connection of its own: other threads wait on the shared one for a long time.
        self._store = rendezvous.store.clone()  # type: ignore[attr-defined]
        if rank == 0:
            self._wire = Wire(Identity(JOB, RANK_0), self, credentials=credentials)
            self.address = (interface, self._wire.listen(interface))
            rendezvous.put(JOB, self.address)
        else:
            self.address = rendezvous.get(JOB)
            self._caller = HeartbeatCaller(f"rank {rank}", self.address, credentials, self._heard, self)
            self._wire = self._caller.wire

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the process with the store has failed; its connections report that
            while not self._closing.is_set():
                due = time.monotonic() + self._period
                retry_soon(self._frozen_after)  # the store's connections too
                self._look()
                self._rounds += 1
                wait = self._thread_of_loop.wait_of(self._frozen_after)
                if self._caller is not None:
                    ours, other = ("", "") if wait is None else (wait.text, "") if wait.ours else ("", wait.text)
                    self._caller.send("alive", self._period / 2, reason=self._reason, ours=ours, other=other)
                elif self._others:
                    self._judge_waits({**self._waits, RANK_0: wait})
                self._serve(due)
        if self._wire is not None:
            self._wire.close(CLOSE_SECONDS)

    def _serve(self, due: float) -> None:
        """Serve the wire until `due`, or the end."""
        while (left := due - time.monotonic()) > 0 and not self._closing.is_set():
            if self._wire is None:
                self._closing.wait(left)
            else:
                self._wire.poll(left)

    def _look(self) -> None:
        if self._store is not None:
            self._store.check([JOB])  # returns once the store has answered
        self._silence.pass_time()
        for name, pid in self.servers().items():
            # Only a stopped server counts as silent: its exit closes connections, which ranks notice at once.
            if name not in self._silence or not is_stopped(pid):
                self._silence.heard(name)
        for name in self._silence.names:
            self._judge(name)

    def _judge_waits(self, waits: Mapping[str, Wait | None]) -> None:
        """End the training if each rank waits, some in dure and some elsewhere: one that does neither may help them."""
        found = {name: wait for name, wait in waits.items() if wait is not None}
        ours = [f"{name} in {wait.text}" for name, wait in found.items() if wait.ours]
        other = [f"{name} in {wait.text}" for name, wait in found.items() if not wait.ours]
        if len(found) > self._others and ours and other and not self._reason:
            self._reason = (
                f"the ranks wait for each other since {self._frozen_after:g} s, {other[0]} and {ours[0]}: they have "
                "made different numbers of steps, or not all of them have entered evaluation() or loaded a state. Give "
                "every rank as many batches as the others, or end the loop of all where replica.step() returns False; "
                "and let all ranks make the calls in which the method needs all."
            )

    def _heard(self, fields: Mapping[str, Any]) -> None:
        self._hear(RANK_0, fields["reason"])

    def _hear(self, name: str, reason: str) -> None:
        self._silence.heard(name)
        self._reason = self._reason or reason  # the first one stays, so that all ranks end with the same

    def _judge(self, name: str) -> None:
        silent = self._silence.seconds(name)
        if silent < self._frozen_after / NAMED:
            self._named.discard(name)
        elif name not in self._named:
            self._named.add(name)
            log.warning("%s is frozen: no heartbeat for %.3g s.", name, self._frozen_after / NAMED)
        if silent >= self._frozen_after and not self._reason:
            self._reason = self._sentence(name)

    def _sentence(self, name: str) -> str:
        return f"{name} is frozen or gone: no heartbeat for {self._frozen_after:g} s, and the other ranks need it."
