"""Frames: what was sent comes out, and nothing else ever does."""

import random
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import raising

from dure.errors import DamagedFrame, Refused
from dure.runtime.wire import frame as frames
from dure.runtime.wire.frame import Header, Kind, Outgoing, Parser, encode_meta, job_code, pack_header
from dure.runtime.wire.seals import KeyedSeals, Prover

JOB = job_code("job")
HEADER = Header(Kind.REQUEST, JOB, rank=3, incarnation=2, request=7)
JSON = st.dictionaries(
    st.text(max_size=5), st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
)


def raw(outgoing, piece=1 << 30):
    """All bytes of a frame, sent in pieces of at most `piece` bytes."""
    out = bytearray()
    while view := outgoing.peek():
        view = view[:piece]
        out += view
        outgoing.advance(len(view))
    return bytes(out)


def feed(parser, data, *, sizes=(1 << 30,), drop=False):
    """Put `data` into a parser, by turns in pieces of `sizes`; the complete frames with their payloads."""
    found, placed, turn = [], bytearray(), 0
    data = memoryview(data)
    while True:
        space = parser.space()
        assert space, "the parser takes no more"
        size = min(len(space), len(data), sizes[turn % len(sizes)])
        turn += 1
        space[:size] = data[:size]
        data = data[size:]
        if size:
            parser.received(size)
        while (frame := parser.take()) is not None:
            if frame.complete:
                found.append((frame, bytes(placed)))
                placed = bytearray()
            elif drop:
                parser.drop()
            else:
                placed = bytearray(frame.header.payload_nbytes)
                parser.place([memoryview(placed)])
        if not data:
            return found


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(
    metas=st.lists(JSON, min_size=1, max_size=4),
    payload=st.binary(max_size=300),
    repeat=st.sampled_from([1, 1, 300, 5000]),
    sizes=st.lists(st.sampled_from([1, 7, 59, 60, 61, 5000, 1 << 20]), min_size=1, max_size=4),
    keyed=st.booleans(),
)
def test_frames_survive_any_cutting(metas, payload, repeat, sizes, keyed):
    ours, theirs = KeyedSeals(b"k", b"up"), KeyedSeals(b"k", b"up")
    payload = payload * repeat
    sizes = [max(size, len(payload) // 200) for size in sizes]
    sent = b"".join(
        raw(Outgoing(HEADER, encode_meta(meta), [memoryview(payload)], ours if keyed else None), max(sizes))
        for meta in metas
    )
    found = feed(Parser(JOB, seals=theirs if keyed else None), sent, sizes=sizes)
    assert [frame.meta for frame, _ in found] == metas
    assert all(got == payload and not frame.aborted for frame, got in found)
    assert all(frame.header.rank == 3 and frame.header.request == 7 for frame, _ in found)


def sample(seals=None):
    return bytearray(raw(Outgoing(HEADER, encode_meta({"fields": {"a": 1}}), [memoryview(bytes(range(200)))], seals)))


@pytest.mark.parametrize("keyed", [False, True])
def test_flipped_bits_are_found(keyed):
    chance = random.Random(1)
    size = len(sample())
    for trial in range(size * 8 if not keyed else 500):
        data = sample(KeyedSeals(b"key", b"x") if keyed else None)
        bit = trial if not keyed else chance.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        parser = Parser(JOB, seals=KeyedSeals(b"key", b"x") if keyed else None)
        with pytest.raises((DamagedFrame, Refused)):
            feed(parser, data)


def test_truncated_frames_are_never_complete():
    data = sample()
    for stop in range(len(data)):
        assert feed(Parser(JOB), data[:stop]) == []


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=2000))
def test_random_bytes_are_refused(data):
    parser = Parser(JOB)
    try:
        assert feed(parser, data) == []
    except DamagedFrame:
        pass
    else:
        assert len(data) < frames.HEADER_NBYTES


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 30), st.integers(0, 2**64 - 1))
def test_a_well_checked_header_with_nonsense_in_it_allocates_nothing(meta, kind, payload_nbytes):
    fields = struct.pack(
        "<4sHBxQiIQIQQ",
        b"dure",
        frames.VERSION,
        kind,
        JOB,
        1,
        1,
        1,
        len(meta),
        payload_nbytes,
        xxhash.xxh3_64_intdigest(meta),
    )
    data = fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)) + meta
    parser = Parser(JOB)
    space = parser.space()
    space[: len(data)] = data
    parser.received(len(data))
    try:
        frame = parser.take()
    except DamagedFrame:
        return
    assert frame is None or kind <= max(Kind)


@pytest.mark.parametrize("nbytes", [frames.META_NBYTES + 1, 2**31, 2**32 - 1])
def test_a_huge_meta_is_refused_by_its_header(nbytes):
    with pytest.raises(DamagedFrame, match=f"announces {nbytes} bytes of meta"):
        feed(Parser(JOB), pack_header(HEADER._replace(meta_nbytes=nbytes)))


def test_a_huge_payload_waits_for_a_place():
    meta = b"{}"
    header = HEADER._replace(meta_nbytes=2, payload_nbytes=1 << 40, meta_check=xxhash.xxh3_64_intdigest(meta))
    parser = Parser(JOB)
    data = pack_header(header) + meta
    parser.space()[: len(data)] = data
    parser.received(len(data))
    frame = parser.take()
    assert frame is not None
    assert not frame.complete
    assert not parser.space(), "nothing may be received before its place is known"


def test_errors_name_what_came_and_what_was_awaited():
    with raising(DamagedFrame, "dure"):
        feed(Parser(JOB), b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n".ljust(100))
    other = bytearray(pack_header(HEADER))
    other[4] = 9
    with raising(Refused, "version 9,"):
        feed(Parser(JOB), other)
    with pytest.raises(Refused, match=f"{job_code('other'):016x}"):
        feed(Parser(JOB), pack_header(HEADER._replace(job=job_code("other"))))


@pytest.mark.parametrize("meta", [b"[" * 100_000, b"[1]", b"{", b"\xff", b"", b'{"a":' + b"1" * 5000 + b"}"])
def test_a_meta_that_is_no_object_is_refused(meta):
    header = HEADER._replace(meta_nbytes=len(meta), meta_check=xxhash.xxh3_64_intdigest(meta))
    with raising(DamagedFrame, "meta"):
        feed(Parser(JOB), pack_header(header) + meta)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("sent", [1, 100, 200_000])
def test_an_aborted_frame_is_marked_and_the_next_one_arrives(sent, keyed):
    ours, theirs = KeyedSeals(b"k", b"up"), KeyedSeals(b"k", b"up")
    payload = bytearray(b"x" * 300_000)
    first = Outgoing(HEADER, b"{}", [memoryview(payload)], ours if keyed else None)
    data = bytearray()
    while len(data) < sent:
        view = first.peek()[: sent - len(data)]
        data += view
        first.advance(len(view))
    first.abort()
    payload[:] = b"y" * 300_000  # the caller has its tensor back
    data += raw(first) + raw(Outgoing(HEADER, b"{}", [memoryview(b"next")], ours if keyed else None))
    (one, got), (two, following) = feed(Parser(JOB, seals=theirs if keyed else None), data)
    assert one.aborted
    assert b"y" not in got
    assert not two.aborted
    assert following == b"next"


def test_a_dropped_payload_is_skipped_and_still_checked():
    data = sample() + sample()
    assert [frame.complete for frame, _ in feed(Parser(JOB), data, drop=True)] == [True, True]
    data[-20] ^= 1
    with pytest.raises(DamagedFrame):
        feed(Parser(JOB), data, drop=True)


def test_keyed_frames_can_be_neither_repeated_left_out_nor_turned_round():
    def frame(seals):
        return raw(Outgoing(HEADER, b"{}", [memoryview(b"payload")], seals))

    host, caller, fresh, other = (
        Prover(key, calling=calling) for key, calling in [(b"k", False), (b"k", True), (b"k", True), (b"o", False)]
    )
    assert host.meet(caller.mine)
    assert caller.meet(host.mine)
    up, down = caller.seals()
    one, two = frame(up), frame(up)
    for data in (one + one, two, frame(down)):
        with raising(DamagedFrame, "authentication"):
            feed(Parser(JOB, seals=host.seals()[1]), data)
    assert len(feed(Parser(JOB, seals=host.seals()[1]), one + two)) == 2
    host.meet(fresh.mine)  # another connection of the same run
    other.mine = host.mine
    other.meet(caller.mine)  # the same connection, and another run's key
    for receiver in (host, other):
        with raising(DamagedFrame, "authentication"):
            feed(Parser(JOB, seals=receiver.seals()[1]), one)


def test_fields_that_json_cannot_say_are_explained():
    with raising(TypeError, "values"):
        encode_meta({"a": object()})
    with raising(ValueError, "most 1048576"):
        encode_meta({"a": "x" * (1 << 20)})
