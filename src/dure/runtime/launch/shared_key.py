"""The key of a run for ranks that were started together.

| `key_file` | rank 0 | the others |
|---|---|---|
| given | reads its file | read theirs, which holds the same key |
| left out | draws a key, puts it into the store of the rendezvous, deletes it once all have it | read it there |

With key files, the notes of the rendezvous have codes (`notes`), so that ranks meet with the key or not at all.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dure.errors import UsageError
from dure.runtime.launch.rendezvous import NONCE, RankEnvironment, Rendezvous
from dure.runtime.wire import Credentials
from dure.runtime.wire.credentials import Integrity

KEY = "key"


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
        rendezvous.get(f"{NONCE} {rank}")  # refuses one with a code
    if rendezvous.place.rank == 0:
        rendezvous.put(KEY, mine.key.hex())
    credentials = Credentials(bytes.fromhex(rendezvous.get(KEY)), integrity)
    rendezvous.exchange("has key", True)
    if rendezvous.place.rank == 0:
        with suppress(RuntimeError):  # the store cannot delete keys
            rendezvous.store.delete_key(KEY)
    return credentials
