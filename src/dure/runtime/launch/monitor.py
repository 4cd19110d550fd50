"""Heartbeats of the ranks of an attached model: notes in the store of the rendezvous.

    rank r, a thread of its own    alive r = number, reason ──>  store  <── the other ranks read it once a second

A rank whose note does not change for a long time is frozen or has failed. A rank that notices this, or a stopped server
process on its machine, adds the reason to its own note, so that all ranks end with the same message. A rank that ends
writes a last note.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dure.errors import PeerLost
from dure.runtime.heartbeat import PERIOD_SECONDS, Silence
from dure.runtime.launch.process_state import is_stopped

if TYPE_CHECKING:
    from dure.runtime.launch.rendezvous import Rendezvous

NAMED = 3
"""A silent rank is logged after this part (one third) of the time after which it ends the training."""

STORE = "the store where the ranks meet, and so rank 0 or torchrun's agent,"
"""Name of the frozen processes if the store does not answer."""

log = logging.getLogger("dure")


class RankMonitor:
    """Writes this rank's heartbeats to the store of `rendezvous`, and reads those of the others, until `close`.

    `check` raises `PeerLost` once one of `ranks` (default: all), or the process of a server, has been silent for
    `frozen_after` seconds. `servers` gives the ids of the server processes that this rank has started. `reachable`:
    the store answers.
    """

    def __init__(self, rendezvous: Rendezvous, frozen_after: float, ranks: Collection[int] | None = None) -> None:
        place = rendezvous.place
        watched = range(place.world_size) if ranks is None else ranks
        self.servers: Callable[[], Mapping[str, int]] = dict
        self.reachable = True
        self._frozen_after = frozen_after
        self._period = min(PERIOD_SECONDS, frozen_after / 8)
        self._rank = place.rank
        self._others = {f"alive {rank}": f"rank {rank}" for rank in watched if rank != place.rank}
        shared: Any = rendezvous.store
        # A connection of its own: other threads wait on the shared one for a long time.
        self._store: Any = shared.clone() if place.world_size > 1 else None
        self._notes: dict[str, str] = {}
        self._silence = Silence()
        self._named: set[str] = set()
        self._rounds = self._seen = 0
        self._store_silence = Silence()
        self._store_silence.heard(STORE)
        self._reason = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dure monitor", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `PeerLost` if a rank or a server is frozen. A waiting thread calls this about once a second."""
        if self._rounds != self._seen:
            self._seen = self._rounds
            self._store_silence.heard(STORE)
        self._store_silence.pass_time()
        if not self._reason and self._store_silence.seconds(STORE) >= self._frozen_after:
            self.reachable = False
            self._reason = self._sentence(STORE)
        if self._reason:
            raise PeerLost(self._reason)

    def close(self) -> None:
        """Stop the heartbeats: this rank has ended."""
        self._closing.set()
        self._thread.join(self._period)

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the rank with the store has failed; its connections report that
            while not self._closing.is_set():
                self._look()
                self._rounds += 1
                self._closing.wait(self._period)
            self._say(ended=True)

    def _look(self) -> None:
        self._say(ended=False)
        self._silence.pass_time()
        for key, name in self._others.items():
            if self._store.check([key]):
                self._hear(name, self._store.get(key).decode())
        for name, pid in self.servers().items():
            if name not in self._silence or not is_stopped(pid):
                self._silence.heard(name)
        for name in (*self._others.values(), *self.servers()):
            self._judge(name)

    def _hear(self, name: str, note: str) -> None:
        if self._notes.get(name) == note:
            return
        self._notes[name] = note
        said = json.loads(note)
        if said["ended"]:
            self._silence.forget(name)
        else:
            self._silence.heard(name)
        self._reason = self._reason or said["reason"]

    def _judge(self, name: str) -> None:
        silent = self._silence.seconds(name)
        if silent < self._frozen_after / NAMED:
            self._named.discard(name)
        elif name not in self._named:
            self._named.add(name)
            log.warning("%s is frozen: no heartbeat for %g s.", name, self._frozen_after / NAMED)
        if silent >= self._frozen_after and not self._reason:
            self._reason = self._sentence(name)

    def _say(self, *, ended: bool) -> None:
        if self._store is not None:
            note = {"round": self._rounds, "reason": self._reason, "ended": ended}
            self._store.set(f"alive {self._rank}", json.dumps(note))

    def _sentence(self, name: str) -> str:
        return f"{name} is frozen or gone: no heartbeat for {self._frozen_after:g} s, and the other ranks need it."
