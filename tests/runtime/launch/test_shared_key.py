"""How ranks come by the key of their run, and the stores where they meet."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dure.errors import DureError, UsageError
from dure.runtime.launch.engine_store import EngineStore, connected, listening_store
from dure.runtime.launch.rendezvous import KEY, NONCE, RankEnvironment, Rendezvous, credentials_of, met


@pytest.fixture
def ranks():
    """Three ranks that meet in this process."""
    meetings = [Rendezvous(RankEnvironment(), "test") for _ in range(3)]
    store = dist.HashStore()
    for rank, rendezvous in enumerate(meetings):
        rendezvous.place, rendezvous.store = RankEnvironment(rank, 3, "127.0.0.1"), store
    return meetings


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(bytes(range(40)))
    path.chmod(0o600)
    return path


def test_rank_0_draws_a_key_and_hands_it_out_once(ranks):
    for rendezvous in ranks:
        rendezvous.put(f"{NONCE} {rendezvous.place.rank}", None)
    with ThreadPoolExecutor(len(ranks)) as pool:
        first = [each.key for each in pool.map(credentials_of, ranks)]
    assert len(first[0]) == 32
    assert first == [first[0]] * 3
    assert not ranks[0].store.check([KEY])
    assert credentials_of(Rendezvous(RankEnvironment(), "alone")).key != first[0]


@pytest.fixture
def meet(monkeypatch):
    """Have two ranks meet in a store that listens, each with a key file or none; what each of them gives or raises."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr("dure.runtime.launch.rendezvous.ALTERED_SECONDS", 0.2)

    def one(rank, file):
        try:
            rendezvous = met(RankEnvironment(rank, 2, "127.0.0.1"), "test", file)
            return rendezvous, credentials_of(rendezvous).key
        except DureError as error:
            return error

    def both(*files):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, (0, 1), files))

    return both


def test_with_a_key_file_nothing_secret_is_in_the_store(meet, file):
    (rendezvous, key), (_, other) = meet(file, file)
    assert key == other == bytes(range(40))
    assert {name.rpartition("/")[2] for name in rendezvous.store.list_keys()} >= {"nonce 0", "nonce 1"}
    assert not rendezvous.store.check([KEY])
    assert credentials_of(met(RankEnvironment(), "alone", file)).key == bytes(range(40))


@pytest.mark.parametrize("has", [0, 1])
def test_a_key_file_at_some_ranks_only_is_refused(meet, file, has):
    lacks = 1 - has
    found = meet(*(file if rank == has else None for rank in (0, 1)))
    assert f"'nonce {lacks}'" in str(found[has])
    assert "or a rank that has another key file or none" in str(found[has])
    assert isinstance(found[lacks], UsageError)
    assert "this rank has no key file: give every rank one, or none" in str(found[lacks])


def test_ranks_do_not_wait_for_one_that_cannot_read_its_key_file(meet, file):
    first, second = meet(file, file.parent / "none")
    assert "cannot read the key file" in str(second)
    assert "'nonce 1'" in str(first)


def test_the_store_of_one_machine_is_a_file_that_goes_with_it():
    store = EngineStore(None, 2)
    ours, theirs = (connected(store.place, 2) for _ in range(2))
    ours.set("a", "b")
    assert theirs.get("a") == b"b"
    assert os.stat(store.place[0]).st_uid == os.geteuid()
    assert not os.path.isfile(os.path.realpath(store.place[0])), "it has no name"
    store.close()
    assert not os.path.exists(store.place[0])


def test_the_store_of_several_machines_listens_on_one_interface():
    store = EngineStore("127.0.0.1", 2)
    host, port = store.place
    connected(store.place, 2).set("a", "b")
    assert connected(store.place, 2).get("a") == b"b"
    assert host == "127.0.0.1"
    with socket.create_server(("127.0.0.2", port)):
        pass  # as another address of this machine is free
    store.close()


def test_a_store_at_a_port_that_is_taken_says_so():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listening_store("127.0.0.1", taken.getsockname()[1], 1)
