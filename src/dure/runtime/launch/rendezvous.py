"""Rendezvous of the ranks that `torchrun`, or another launcher with its environment variables, has started.

The variables are RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A process without them is a world of one. Ranks
exchange notes (JSON values) in the engine's store. A rank that fails leaves a note too, which ends the waits of others.

Everyone can write to the store who reaches its port. With key files, a note has a code:

    note = code, space, JSON value        code = HMAC-SHA256 under the key of the meeting over name and JSON value

Ranks with a key file draw a nonce each at the start of a meeting, and derive its key from these and the file's. So a
note that was forged, altered, moved to another name, or recorded in an earlier meeting or attempt has a wrong code, and
ranks meet with the key or not at all. The key of the run is then agreed on:

| `key_file` | rank 0 | the others |
|---|---|---|
| given | reads its file | read theirs, which holds the same key |
| left out | draws a key, puts it into the store, deletes it once all have it | read it there |
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from dure.core.node import nothing
from dure.core.text import log, quoted
from dure.errors import AlteredNote, CallTimeout, PeerLost, RemoteError, UsageError
from dure.runtime.launch.engine_store import address_toward, lead_engine, listening_store
from dure.runtime.wire import Credentials
from dure.runtime.wire.seals import Integrity

_MARK = "code "
"""Start of a note with a code. No JSON value starts with it."""

_WAS_ALTERED = "in the store where the ranks meet was altered"

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

MEETING_SECONDS = 120.0
"""Time limit for the start of the other ranks."""

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable of torchrun: whether its agent has the store."""

PARTING_SECONDS = 5.0
"""Time limit for the others to read the last note of rank 0."""

LOOK_SECONDS = 0.02
"""Period of the look for a missing note."""

ALTERED_SECONDS = 10.0
"""Time limit for the true note in place of an altered one."""

FAILURE = "failure"
"""Name of the note of a rank that has failed."""

NONCE = "nonce"
"""Name of the first note of each rank."""

_DIGITS = 9
"""Most digits of a number in the environment."""

KEY = "key"


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The place of this process among those that were started together. `master` is None in a world of one.

    `restarts`: how often the elastic agent has restarted all of them under the same `launch`. `local_size`: processes
    on this machine, as far as known, and `local_rank` the number of this one among them.
    """

    rank: int = 0
    world_size: int = 1
    master: str | None = None
    restarts: int = 0
    launch: str = ""
    local_size: int = 1
    local_rank: int = 0

    @property
    def interface(self) -> str:
        """The address at which others reach this machine: that of its route to the master."""
        if self.master is None:
            return "127.0.0.1"
        return address_toward(self.master)


def place(environ: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """Read the place of this process from its environment; None if no launcher has started it.

    Raises `UsageError` for an invalid environment.
    """
    given = [name for name in NEEDED if environ.get(name)]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise UsageError(
            f"the environment sets {', '.join(given)} and not {', '.join(missing)}: start with torchrun, which sets "
            "all, or unset RANK and WORLD_SIZE to train alone."
        )
    rank, world_size = (_whole(name, environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if not 0 <= rank < world_size:
        raise UsageError(f"RANK must be from 0 to {world_size - 1} (WORLD_SIZE is {world_size}), it is {rank}.")
    master = environ["MASTER_ADDR"] if world_size > 1 else None
    optional = {"TORCHELASTIC_RESTART_COUNT": 0, "LOCAL_WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    restarts, local_size, local_rank = (_whole(name, environ.get(name) or str(each)) for name, each in optional.items())
    _whole("MASTER_PORT", environ["MASTER_PORT"])
    return RankEnvironment(rank, world_size, master, restarts, _launch(environ), local_size, local_rank)


@contextmanager
def announced(place: RankEnvironment, port: int) -> Iterator[None]:
    """Inside, the environment tells `place`: for ranks of a launcher that sets other variables than torchrun."""
    mine = {"RANK": place.rank, "WORLD_SIZE": place.world_size, "MASTER_ADDR": place.master, "MASTER_PORT": port}
    mine |= {"LOCAL_WORLD_SIZE": place.local_size, "LOCAL_RANK": place.local_rank}
    before = {name: os.environ[name] for name in mine if name in os.environ}
    os.environ.update({name: str(value) for name, value in mine.items()})
    try:
        yield
    finally:
        for name in mine:
            del os.environ[name]
        os.environ.update(before)


def _launch(environ: Mapping[str, str]) -> str:
    """Identity of a launch, the same for all its restarts.

    It is the run id of torchrun, or, without one, the agent process that is the parent of this process.
    """
    given = environ.get("TORCHELASTIC_RUN_ID", "none")
    if given != "none":
        return given
    agent = os.getppid()
    with suppress(OSError):  # without /proc the process id alone has to do
        began = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return f"{socket.gethostname()}-{agent}-{began}"
    return f"{socket.gethostname()}-{agent}"


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise UsageError(f"the environment variable {name} must be a whole number, it is {quoted(text)}.")
    return int(text)


class Rendezvous:
    """A store of notes that the ranks leave for each other under names. Every wait has a time limit.

    `topic` and a count of its uses separate one rendezvous from the next. `store` is the engine's. With `key`, the
    content of a key file, all ranks meet here, and notes have codes; an altered note is ignored until its rank has
    written it, or for ALTERED_SECONDS.

    Raises `AlteredNote` or `CallTimeout` if another rank does not come with the same `key`.
    """

    def __init__(self, place: RankEnvironment, topic: str, key: bytes | None = None) -> None:
        import torch.distributed as dist

        self.place = place
        self.key = key
        self.seal = NoteSeal(key)
        self._altered: set[str] = set()
        lead_engine(place.interface)
        base = _engine_store(place)
        number = base.add(f"dure/{topic}/{place.rank}", 1)
        self.store = dist.PrefixStore(f"dure/{topic}/meeting {number}", base)  # type: ignore[attr-defined]
        self._met = key is None
        mine = self.seal.nonce
        self.put(f"{NONCE} {place.rank}", mine)
        if mine is not None:
            self._meet(topic, mine)

    def _meet(self, topic: str, mine: str) -> None:
        """Derive the key of this meeting from the nonces of all ranks."""
        ranks = range(self.place.world_size)
        try:
            nonces = [mine if rank == self.place.rank else self.get(f"{NONCE} {rank}") for rank in ranks]
        except RemoteError as error:
            self.fail(f"{type(error).__name__}: {error}")  # ranks without a key file learn that others have one
            raise
        self.seal = self.seal.of_meeting(topic, nonces)
        self._met = True

    def put(self, name: str, value: Any) -> None:
        self.store.set(name, self.seal.write(name, value))

    def get(self, name: str, seconds: float = MEETING_SECONDS, check: Callable[[], None] = nothing) -> Any:
        """Wait for the note `name`. Raises `PeerLost` if a rank has failed; `AlteredNote`; `CallTimeout`.

        `check` is called at each look; an exception that it raises ends the wait.
        """
        last = time.monotonic() + seconds
        error: RemoteError = CallTimeout(
            f"rank {self.place.rank} waited {seconds:g} s for {name!r} from the other ranks."
        )
        while True:
            try:
                reason = self.failure()  # looked for first: a rank may leave its note and then fail
                if self.store.check([name]):
                    return self.seal.read(name, self.store.get(name))
            except AlteredNote as altered:
                self._warn(name, altered)
                if not isinstance(error, AlteredNote):
                    error, last = altered, min(last, time.monotonic() + ALTERED_SECONDS)
            except RuntimeError as lost:
                if isinstance(error, AlteredNote):  # meanwhile the process with the store has ended
                    raise error from None
                raise PeerLost(
                    f"rank {self.place.rank} waited for {name!r}, and the store where the ranks meet cannot be "
                    f"reached: rank 0 or torchrun's agent has ended, or its network ({lost})."
                ) from None
            if reason is not None:
                raise PeerLost(f"rank {self.place.rank} waited for the others: {reason}")
            check()
            if time.monotonic() > last:
                raise error
            time.sleep(LOOK_SECONDS)

    def _warn(self, name: str, altered: AlteredNote) -> None:
        """Log the first altered note under `name`."""
        if name not in self._altered:
            self._altered.add(name)
            log.warning("rank %d ignores a note: %s", self.place.rank, altered)

    def exchange(self, name: str, mine: Any, check: Callable[[], None] = nothing) -> list[Any]:
        """Put `mine` under `name`, and wait for the notes of all ranks, in order of ranks."""
        self.put(f"{name} {self.place.rank}", mine)
        return [self.get(f"{name} {rank}", check=check) for rank in range(self.place.world_size)]

    def part(self) -> None:
        """End the reads of this rank. Rank 0, whose process may hold the store, waits a little for the others."""
        self.put(f"parted {self.place.rank}", True)
        if self.place.rank == 0:
            with suppress(PeerLost, AlteredNote, CallTimeout):
                for rank in range(1, self.place.world_size):
                    self.get(f"parted {rank}", PARTING_SECONDS)

    def fail(self, reason: str) -> None:
        """Leave a note that this rank has failed, which ends the waits of others."""
        self.put(FAILURE, f"rank {self.place.rank} failed with {reason}")

    def failure(self) -> str | None:
        """The reason of a failed rank; None if no rank has failed.

        Before the ranks have met, nothing shows that the note of a failure is not one of an earlier attempt.
        """
        if not self._met:
            return None
        try:
            return self.seal.read(FAILURE, self.store.get(FAILURE)) if self.store.check([FAILURE]) else None
        except AlteredNote as altered:
            self._warn(FAILURE, altered)
            return None


_OPEN: dict[tuple[str, int], Any] = {}
"""Stores that this process has opened, by address. They stay open: other ranks count their meetings there."""


def _engine_store(place: RankEnvironment) -> Any:
    import torch.distributed as dist

    if place.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if _hosts_store(place):
        address = place.interface, int(os.environ["MASTER_PORT"])
        with suppress(OSError):  # the user's own store has the port; the engine uses it again
            if address not in _OPEN:
                _OPEN[address] = listening_store(*address, place.world_size)
            return _OPEN[address]
    meetings = dist.rendezvous("env://", timeout=timedelta(seconds=MEETING_SECONDS))  # type: ignore[attr-defined]
    store, _, _ = next(meetings)
    return store


def _hosts_store(place: RankEnvironment, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process must open the store: torchrun's agent has one, other launchers have none."""
    return place.rank == 0 and environ.get(AGENT_STORE) != "True"


def met(place: RankEnvironment, topic: str, key_file: Path | None) -> Rendezvous:
    """The rendezvous of all ranks, whose notes have codes if they have key files; every rank calls this.

    Raises:
        UsageError: `key_file` cannot be read, or may be read by others.
        AlteredNote, CallTimeout: another rank has another key file or none, or does not come.
    """
    if key_file is None:
        return Rendezvous(place, topic)
    try:
        key = Credentials.of_file(key_file).key
    except UsageError:
        Rendezvous(place, topic)  # the others read there that this rank has no key, and do not wait for it
        raise
    return Rendezvous(place, topic, key)


def credentials_of(rendezvous: Rendezvous, integrity: Integrity = "mac") -> Credentials:
    """Agree on the credentials of the run of all ranks in `rendezvous`; every rank calls this.

    Raises:
        UsageError: other ranks have a key file, and this rank has none.
        PeerLost: another rank failed before all had the key.
    """
    if rendezvous.key is not None:
        return Credentials(rendezvous.key, integrity)
    mine = Credentials.drawn(integrity)
    world = range(rendezvous.place.world_size)
    if len(world) == 1:
        return mine
    for rank in world:
        rendezvous.get(f"{NONCE} {rank}")  # raises for a rank that has a key file, before a key is in the store
    if rendezvous.place.rank == 0:
        rendezvous.put(KEY, mine.key.hex())
    credentials = Credentials(bytes.fromhex(rendezvous.get(KEY)), integrity)
    rendezvous.exchange("has key", True)  # all have read the key: it need not stay in the store
    if rendezvous.place.rank == 0:
        with suppress(RuntimeError):  # the store cannot delete keys
            rendezvous.store.delete_key(KEY)
    return credentials


class NoteSeal:
    """Writes and reads notes with a code under `key`, or without a code where `key` is None."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key

    def of_meeting(self, topic: str, nonces: Sequence[str]) -> NoteSeal:
        """The seal of one meeting of the ranks that have drawn `nonces`."""
        assert self._key is not None
        return NoteSeal(hmac.digest(self._key, json.dumps(["dure meeting", topic, *nonces]).encode(), "sha256"))

    @property
    def nonce(self) -> str | None:
        """A new nonce; None without a key."""
        return None if self._key is None else secrets.token_hex(32)

    def write(self, name: str, value: Any) -> str:
        """The note of `value` under `name`."""
        text = json.dumps(value)
        return text if self._key is None else f"{_MARK}{self._code(name, text)} {text}"

    def read(self, name: str, note: bytes) -> Any:
        """The value of a note. Raises `AlteredNote` for one that no rank of this meeting has written under `name`."""
        try:
            text = note.decode()
            if self._key is not None:
                text = self._checked(name, text)
            elif text.startswith(_MARK):
                raise UsageError(
                    f"the note {name!r} of another rank has a code of a key file, and this rank has no key file: give "
                    "every rank one, or none."
                )
            return json.loads(text)
        except UsageError:
            raise
        except (ValueError, RecursionError):  # no UTF-8, no JSON, or a number of more digits than Python reads
            raise AlteredNote(f"the note {name!r} {_WAS_ALTERED}: no rank wrote it.") from None

    def _checked(self, name: str, text: str) -> str:
        """The JSON text of a note whose code is valid."""
        code, _, value = text.removeprefix(_MARK).partition(" ")
        if not text.startswith(_MARK) or not hmac.compare_digest(code.encode(), self._code(name, value).encode()):
            raise AlteredNote(
                f"the note {name!r} {_WAS_ALTERED}: it has no valid code of the key file. Another process wrote it, or "
                "a rank that has another key file or none."
            )
        return value

    def _code(self, name: str, text: str) -> str:
        assert self._key is not None
        return hmac.digest(self._key, json.dumps([name, text]).encode(), "sha256").hex()
