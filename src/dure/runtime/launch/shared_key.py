"""The key of a run for ranks that were started together.

| `key_file` | rank 0 | the others |
|---|---|---|
| given | reads its file | read theirs, which holds the same key |
| left out | draws a key, puts it into the store of the rendezvous, deletes it once all have it | read it there |
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dure.errors import UsageError
from dure.runtime.launch.rendezvous import Rendezvous
from dure.runtime.wire import Credentials
from dure.runtime.wire.credentials import Integrity

KEY = "key"


def credentials_of(rendezvous: Rendezvous, key_file: Path | None, integrity: Integrity = "mac") -> Credentials:
    """Agree on the credentials of the run of all ranks in `rendezvous`; every rank calls this.

    Raises:
        UsageError: `key_file` cannot be read, may be read by others, or is given at some ranks only.
        PeerLost: another rank failed before all had the key.
    """
    if key_file is not None:
        mine = Credentials.of_file(key_file, integrity)
    elif rendezvous.place.rank == 0:
        mine = Credentials.drawn(integrity)
    if rendezvous.place.world_size == 1:
        return mine
    if rendezvous.place.rank == 0:
        rendezvous.put(KEY, None if key_file is not None else mine.key.hex())
    note = rendezvous.get(KEY)
    if (note is None) != (key_file is not None):
        has, lacks = ("0", rendezvous.place.rank) if note is None else (rendezvous.place.rank, "0")
        raise UsageError(f"rank {has} has a key file and rank {lacks} has none: give every rank one, or none.")
    if note is None:
        return mine
    credentials = Credentials(bytes.fromhex(note), integrity)
    rendezvous.exchange("has key", True)
    if rendezvous.place.rank == 0:
        with suppress(RuntimeError):  # the store cannot delete keys
            rendezvous.store.delete_key(KEY)
    return credentials
