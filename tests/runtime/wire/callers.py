"""Callers to be killed: a process that makes more of itself without importing anything twice.

    python callers.py PORT NUMEL

For each line on standard input, `NAME INCARNATION`, a child connects to the server and pushes NUMEL values, all equal
to its incarnation, for ever. Its process id is printed once it is connected.
"""

import os
import sys

import torch

from dure.runtime.wire import Identity, Request, Wire


def push_for_ever(name, incarnation, port, numel):
    wire = Wire(Identity("job", name, rank=1, incarnation=incarnation))
    wire.connect("server 0", "127.0.0.1", port, 10.0)
    print(os.getpid(), flush=True)
    gradient = torch.full((numel,), float(incarnation))
    while True:
        out = []
        wire.call("server 0", Request("service", "push", [gradient], fields={"life": incarnation}), out.append)
        while not out:
            wire.poll(1.0)


def main():
    port, numel = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    children = []
    for line in sys.stdin:
        name, incarnation = line.rsplit(maxsplit=1)
        child = os.fork()
        if not child:
            push_for_ever(name, int(incarnation), port, numel)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
