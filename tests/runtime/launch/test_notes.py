"""Notes with codes, in a store that a forger reads and writes as he likes."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from support.wording import raising

from dure.errors import AlteredNote, PeerLost
from dure.runtime.launch.rendezvous import NoteSeal, RankEnvironment, Rendezvous

KEY = bytes(range(32))


class Forger:
    """A process that reaches the port of the store, and has no key."""

    def __init__(self, port: int) -> None:
        self.store: Any = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=5))

    def named(self, name: str, meeting: int = 1) -> str:
        return f"dure/test/meeting {meeting}/{name}"

    def read(self, name: str, meeting: int = 1) -> bytes:
        return self.store.get(self.named(name, meeting))  # type: ignore[no-any-return]

    def write(self, name: str, note: str | bytes, meeting: int = 1) -> None:
        self.store.set(self.named(name, meeting), note)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of a store that listens, as ranks of two find it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr("dure.runtime.launch.rendezvous.ALTERED_SECONDS", 0.2)
    return port


def met(key: bytes | None = KEY) -> list[Rendezvous]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: Rendezvous(RankEnvironment(rank, 2, "127.0.0.1"), "test", key), (0, 1)))


def test_a_note_is_valid_under_its_name_in_its_meeting_alone() -> None:
    meeting = NoteSeal(KEY).of_meeting("test", ["a", "b"])
    note = meeting.write("record", {"loss": 1.5})
    assert meeting.read("record", note.encode()) == {"loss": 1.5}
    file = NoteSeal(KEY)
    others = [file, file.of_meeting("test", ["a", "c"]), file.of_meeting("probe", ["a", "b"])]
    for seal in (*others, NoteSeal(b"another" * 5).of_meeting("test", ["a", "b"])):
        with raising(AlteredNote, "record"):
            seal.read("record", note.encode())
    for name, altered in [
        ("failure", note),
        ("record", note.replace("1.5", "2.5")),
        ("record", note + " "),
        ("record", '{"loss": 1.5}'),
        ("record", "code "),
        ("record", ""),
    ]:
        with pytest.raises(AlteredNote, match=f"'{name}'.*was altered"):
            meeting.read(name, altered.encode())
    with raising(AlteredNote, "altered"):
        meeting.read("record", b"\xff")


@pytest.mark.parametrize(
    "note", [b"9" * 5000, b"[" * 100_000, b"\xff", b"", b"\0"], ids=["digits", "deep", "bytes", "none", "0"]
)
@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
def test_a_note_that_cannot_be_read_is_altered(note: bytes, key: bytes | None) -> None:
    with raising(AlteredNote, "record"):
        NoteSeal(key).read("record", note)


def test_forged_failures_end_no_wait_and_hide_no_failure(port: int, caplog: pytest.LogCaptureFixture) -> None:
    one, other = met()
    forger = Forger(port)
    forger.write("failure", json.dumps("rank 1 failed with OSError: forged"))
    assert one.failure() is None
    other.put("about 1", 7)
    assert one.get("about 1") == 7
    assert "rank 0 ignores a note: the note 'failure'" in caplog.text
    other.fail("too little memory")
    with raising(PeerLost, "rank 1"):
        one.get("about 2")


def test_a_forged_note_is_not_taken_for_the_true_one(port: int) -> None:
    one, other = met()
    forger = Forger(port)
    other.put("server 1", ["10.0.0.1", 80])
    for note in ('["10.0.0.9", 80]', forger.read("server 1")):
        forger.write("server 2", note)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(one.get, "server 2")
            other.put("server 2", "true")
            assert waiting.result() == "true"
    forger.write("server 1", b"\xff\xfe")
    with raising(AlteredNote, "server 1"):
        one.get("server 1")


def test_notes_of_an_earlier_meeting_are_worth_nothing(port: int) -> None:
    _, other = met()
    forger = Forger(port)
    other.put("record", "old")
    other.fail("old")
    again, _ = met()
    for name in ("nonce 0", "nonce 1", "record", "failure"):
        forger.write(name, forger.read(name), meeting=2)
    assert again.failure() is None
    with pytest.raises(AlteredNote):
        again.get("record", 5.0)
    with ThreadPoolExecutor(2) as pool:  # rank 0 meets a rank 1 whose nonce is the one of the first meeting
        late = pool.submit(Rendezvous, RankEnvironment(0, 2, "127.0.0.1"), "test", KEY)
        forger.write("nonce 1", forger.read("nonce 1"), meeting=3)
        forger.write("nonce 0", forger.read("nonce 0"), meeting=3)
        forger.write("record", forger.read("record"), meeting=3)
        with pytest.raises(AlteredNote):
            late.result().get("record", 5.0)


def test_without_a_key_file_garbage_is_named(port: int) -> None:
    one, _ = met(None)
    forger = Forger(port)
    forger.write("failure", b"\xff")
    forger.write("record", "{")
    assert one.failure() is None
    with raising(AlteredNote, "record"):
        one.get("record")
