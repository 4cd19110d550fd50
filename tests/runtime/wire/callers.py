"""Callers to be killed: a process that makes more of itself without importing anything twice.

    python callers.py PORT NUMEL LENT_NBYTES

For each line on standard input, `NAME INCARNATION`, a child connects to the server and pushes NUMEL values, all equal
to its incarnation, for ever. If they are lent (LENT_NBYTES as in `WireLimits`), it pulls as many after each push,
copied and then read where they lie, and says "torn" unless they are all equal too. Its process id is printed once it is
connected.
"""

import os
import sys

import torch

from dure.core.node import Reply
from dure.runtime.wire import Credentials, Identity, Request, Wire, WireLimits


def push_for_ever(name, incarnation, port, numel, lent_nbytes):
    identity, limits = Identity("job", name, rank=1, incarnation=incarnation), WireLimits(lent_nbytes=lent_nbytes)
    wire = Wire(identity, limits=limits, credentials=Credentials(bytes(range(32))))
    wire.connect("server 0", "127.0.0.1", port, 10.0)
    print(os.getpid(), flush=True)
    gradient, into = torch.full((numel,), float(incarnation)), torch.zeros(numel)
    requests = [Request("service", "push", [gradient], fields={"life": incarnation})]
    if lent_nbytes <= 4 * numel:
        requests += [Request("service", "pull", into=[into]), Request("service", "pull", into=None)]
    while True:
        for request in requests:
            out = []
            wire.call("server 0", request, out.append)
            while not out:
                wire.poll(1.0)
            (reply,) = out
            if not isinstance(reply, Reply):
                raise SystemExit(f"{request.method}: {reply}")
            for tensor in reply.tensors:
                if tensor.min() != tensor.max():
                    print("torn", flush=True)
            reply.release()


def main():
    port, numel, lent_nbytes = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    children = []
    for line in sys.stdin:
        name, incarnation = line.rsplit(maxsplit=1)
        child = os.fork()
        if not child:
            push_for_ever(name, int(incarnation), port, numel, lent_nbytes)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
