"""The line for a shell that starts the ranks by torchrun."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.run.emit.launch import Launch

PORT = 29500
"""torchrun's own port of a rendezvous."""


def emit(launch: Launch) -> str:
    """The line, after a comment on the machines where it runs."""
    where = "Run this line on the machine; a second run there needs a --master-port of its own."
    if launch.nodes > 1:
        where = f"Run this line on each machine. NODE is its number, 0 to {launch.nodes - 1}; HOST is machine 0."
    return f"# {launch.described}. {where}\n{line(launch)}\n"


def line(launch: Launch, ranks: str = "") -> str:
    """The line alone. On several machines it has placeholders: NODE for a machine's number, HOST for machine 0.

    `ranks` replaces the number of ranks. The rendezvous is static. torchrun's other one, c10d, which --standalone is
    too, unpickles what it finds in its store: everyone who reaches the port could execute code.
    """
    start = start_words(launch.nodes, ranks or str(launch.ranks))
    return shlex.join([*start, *launch.restarts, "-m", *launch.arguments])


def start_words(nodes: int, ranks: str) -> list[str]:
    """The words of the line that start `ranks` processes on each of `nodes` machines, without what they run."""
    if nodes == 1:
        return ["torchrun", "--nproc-per-node", ranks]
    where = ["--nnodes", str(nodes), "--node-rank", "NODE", "--nproc-per-node", ranks]
    return ["torchrun", *where, "--master-addr", "HOST", "--master-port", str(PORT)]
