"""What the sealing of frames costs: authentication codes, calls over loopback, and TLS 1.3 beside them.

    python bench/sealing.py [--repeats 5] [--values 25000000] [--json FILE]

    codes    candidates for the code of a small frame (300 bytes), and digests of a payload in pieces of 1 MiB
    calls    a small call, and a push of `values` float32 that travels, between two processes over TCP of this machine
             (payloads with a code, or with a checksum alone) and over its Unix socket; and what part of a small call
             its four codes are: those of request and reply, made at one end and checked at the other
    tls      a round trip of 300 bytes and a transfer of 100 MB over one TCP connection between two processes, plain and
             under TLS 1.3 of the standard library, whose client trusts one certificate only (made with `openssl`)

`bench/against_commit.py` compares whole benchmarks with those of a commit without sealing.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import multiprocessing
import secrets
import shutil
import socket
import ssl
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash
from _script import parse, told

from dure.core.node import Call, Reply, TensorSpec
from dure.runtime.wire import Credentials, Identity, Request, Respond, Wire, WireLimits
from dure.runtime.wire.seals import KeyedSeals, check_tag

SMALL_NBYTES = 300
PIECE_NBYTES = 1 << 20
TRANSPORTS = {"TCP, mac": ("mac", False), "TCP, checksum": ("checksum", False), "Unix socket": ("mac", True)}

Seconds = dict[str, float]


def fastest(work: Callable[[], object], times: int) -> float:
    """Seconds of one call of `work`: the least of five means over `times` calls."""
    means = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            work()
        means.append((time.perf_counter() - began) / times)
    return min(means)


# ---- codes


def codes() -> Seconds:
    """Seconds of each candidate."""
    key, frame, piece = secrets.token_bytes(32), secrets.token_bytes(SMALL_NBYTES), secrets.token_bytes(PIECE_NBYTES)
    keyed = hashlib.blake2b(key=key, digest_size=16)

    def copied() -> bytes:
        mac = keyed.copy()
        mac.update(frame)
        return mac.digest()

    small: dict[str, Callable[[], object]] = {
        "hmac.digest, SHA-256": lambda: hmac.digest(key, frame, "sha256"),
        "BLAKE2b, keyed anew": lambda: hashlib.blake2b(frame, key=key, digest_size=16).digest(),
        "BLAKE2b, a copy of the keyed": copied,
    }
    large: dict[str, Callable[[], object]] = {
        "SHA-256": lambda: hashlib.sha256(piece).digest(),
        "BLAKE2b": lambda: hashlib.blake2b(piece).digest(),
        "xxh3-64": lambda: xxhash.xxh3_64_intdigest(piece),
    }
    found = {name: fastest(work, 5000) for name, work in small.items()}
    print(f"a code of {SMALL_NBYTES} bytes: {shown(found, 1e6, 'us')}")
    pieces = {name: fastest(work, 10) for name, work in large.items()}
    rates = {name: PIECE_NBYTES / seconds / 1e9 for name, seconds in pieces.items()}
    print(f"digests of a payload: {shown(rates, 1, 'GB/s')}")
    return found | {f"{name}, 1 MiB": seconds for name, seconds in pieces.items()}


def shown(found: Seconds, scale: float, unit: str) -> str:
    return ", ".join(f"{name} {each * scale:.2f} {unit}" for name, each in found.items())


# ---- calls


class Echo:
    """A host that takes all and answers at once."""

    def __init__(self, values: int) -> None:
        self.specs = {"ping": [], "push": [TensorSpec("float32", values)]}
        self.over = False

    def admit(self, caller: Identity) -> None:
        return None

    def expects(self, service: str, method: str) -> list[TensorSpec]:
        return self.specs[method]

    def request(self, service: str, call: Call, respond: Respond) -> None:
        respond(Reply(call.fields))

    def lost(self, loss: object) -> None:
        self.over = True


def host(pipe: Connection, values: int, integrity: Any, unix: bool) -> None:
    torch.set_num_threads(1)
    echo, limits = Echo(values), WireLimits(lent_nbytes=1 << 60)  # so that a push travels
    wire = Wire(Identity("bench", "server 0"), echo, limits, credentials=Credentials(bytes(32), integrity))
    pipe.send(wire.listen(unix=unix))
    while not echo.over:
        wire.poll(1.0)
    wire.close()


def calls(given: argparse.Namespace) -> dict[str, Seconds]:
    """By transport: seconds of a small call, its codes' part of them, seconds of a push."""
    found, values = {}, given.values
    for name, (integrity, unix) in TRANSPORTS.items():
        ours, theirs = multiprocessing.get_context("forkserver").Pipe()
        arguments = (theirs, values, integrity, unix)
        process = multiprocessing.get_context("forkserver").Process(target=host, args=arguments, daemon=True)
        process.start()
        limits, credentials = WireLimits(lent_nbytes=1 << 60), Credentials(bytes(32), integrity)
        wire = Wire(Identity("bench", "worker 0"), limits=limits, credentials=credentials)
        wire.connect("server 0", "127.0.0.1", ours.recv())
        small = [ask(wire, "ping", []) for _ in range(given.calls)]
        gradient = torch.ones(values)
        large = [ask(wire, "push", [gradient]) for _ in range(given.repeats + 2)][2:]
        wire.close()
        process.join(10)
        median = statistics.median(small)
        found[name] = {"call": median, "codes": 4 * one_code() / median, "push": statistics.median(large)}
        rate = 4 * values / found[name]["push"] / 1e9
        print(f"{name}: a call {median * 1e6:.1f} us, {found[name]['codes']:.1%} of it codes; a push {rate:.2f} GB/s")
    return found


def ask(wire: Wire, method: str, tensors: list[torch.Tensor]) -> float:
    """Seconds of a call."""
    out: list[object] = []
    began = time.perf_counter()
    wire.call("server 0", Request("service", method, tensors, fields={"worker": 0, "step": 17}), out.append)
    while not out:
        wire.poll(1.0)
    assert isinstance(out[0], Reply), out[0]
    return time.perf_counter() - began


def one_code() -> float:
    """Mean seconds to make and to check the code of a small frame, as the wire does."""
    ours, theirs = (KeyedSeals(bytes(32), b"to host") for _ in range(2))
    header, meta = bytes(60), bytes(SMALL_NBYTES - 60)

    def check() -> None:
        check_tag(ours.tag(header, meta), theirs.tag(header, meta))

    return fastest(check, 5000) / 2


# ---- TLS


def certificate(folder: Path) -> tuple[Path, Path] | None:
    """A certificate for 127.0.0.1 signed by itself, and its key; None without `openssl`."""
    if shutil.which("openssl") is None:
        return None
    signed, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=dure", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(signed)], check=True, capture_output=True)
    return signed, key


def serve_tls(pipe: Connection, signed: Path | None, key: Path | None, given: argparse.Namespace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if signed is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(signed, key)
        sock = context.wrap_socket(sock, server_side=True)
    with sock:
        for _ in range(given.calls):
            sock.sendall(received(sock, memoryview(bytearray(SMALL_NBYTES))))
        place = memoryview(bytearray(given.bulk))
        for _ in range(given.repeats):
            received(sock, place)
            sock.sendall(b"!")


def received(sock: socket.socket, place: memoryview) -> memoryview:
    start = 0
    while start < len(place):
        got = sock.recv_into(place[start : start + PIECE_NBYTES])
        assert got, "the other end is gone"
        start += got
    return place


def tls(given: argparse.Namespace, folder: Path | None) -> Seconds | None:
    """Seconds of a round trip and of a transfer; plain without a `folder` for a certificate."""
    made = certificate(folder) if folder is not None else (None, None)
    if made is None:
        return None
    processes = multiprocessing.get_context("forkserver")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=serve_tls, args=(theirs, *made, given), daemon=True)
    process.start()
    sock = socket.create_connection(("127.0.0.1", ours.recv()))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if made[0] is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(made[0])
        sock = context.wrap_socket(sock, server_hostname="127.0.0.1")
    frame, bulk, place = bytes(SMALL_NBYTES), bytes(given.bulk), memoryview(bytearray(SMALL_NBYTES))
    small, large = [], []
    with sock:
        for _ in range(given.calls):
            began = time.perf_counter()
            sock.sendall(frame)
            received(sock, place)
            small.append(time.perf_counter() - began)
        for _ in range(given.repeats):
            began = time.perf_counter()
            sock.sendall(bulk)
            received(sock, place[:1])
            large.append(time.perf_counter() - began)
        kind = f"TLS, {sock.cipher()}" if isinstance(sock, ssl.SSLSocket) else "plain TCP"
    process.join(10)
    found = {"round_trip": statistics.median(small), "transfer": statistics.median(large)}
    print(f"{kind}: {found['round_trip'] * 1e6:.1f} us there and back, {given.bulk / found['transfer'] / 1e9:.2f} GB/s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--values", type=int, default=25_000_000)
    parser.add_argument("--calls", type=int, default=2000, help="small calls and round trips")
    parser.add_argument("--bulk", type=int, default=100_000_000, help="bytes of a transfer under TLS")
    parser.add_argument("--json", type=Path)
    given = parse(parser, values=250_000, repeats=2, calls=50, bulk=1_000_000)
    torch.set_num_threads(1)
    with told("sealing", given) as facts:
        facts["codes"] = codes()
        facts["calls"] = calls(given)
        with tempfile.TemporaryDirectory() as folder:
            facts["tcp"], facts["tls"] = tls(given, None), tls(given, Path(folder))


if __name__ == "__main__":
    main()
