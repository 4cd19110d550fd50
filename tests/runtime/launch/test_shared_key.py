"""How ranks come by the key of their run, and the stores where they meet."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dure.errors import UsageError
from dure.runtime.launch.engine_store import EngineStore, connected, listening_store
from dure.runtime.launch.rendezvous import RankEnvironment, Rendezvous
from dure.runtime.launch.shared_key import KEY, credentials_of


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


def keys(ranks, files):
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [each.key for each in pool.map(credentials_of, ranks, files)]


def test_rank_0_draws_a_key_and_hands_it_out_once(ranks):
    first = keys(ranks, [None] * 3)
    assert len(first[0]) == 32
    assert first == [first[0]] * 3
    assert not ranks[0].store.check([KEY])
    assert credentials_of(Rendezvous(RankEnvironment(), "alone"), None).key != first[0]


def test_with_a_key_file_nothing_secret_is_in_the_store(ranks, file):
    assert keys(ranks, [file] * 3) == [bytes(range(40))] * 3
    assert ranks[0].store.get(KEY) == b"null"
    assert credentials_of(Rendezvous(RankEnvironment(), "alone"), file).key == bytes(range(40))


@pytest.mark.parametrize(("has", "lacks"), [(0, 1), (1, 0)])
def test_a_key_file_at_some_ranks_only_is_refused(ranks, file, has, lacks):
    ranks[0].put(KEY, "00" * 32 if lacks == 0 else None)
    with pytest.raises(UsageError, match=f"rank {has} has a key file and rank {lacks} has none"):
        credentials_of(ranks[1], file if has == 1 else None)


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
