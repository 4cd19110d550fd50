"""The line for a shell that starts the ranks by torchrun."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.run.emit.launch import Launch

PORT = 29400
"""torchrun's own port of a rendezvous."""


def emit(launch: Launch) -> str:
    """The line, after a comment on the machines where it runs."""
    where = "Run this line on the machine."
    if launch.nodes > 1:
        where = f"Run this line on each machine. HOST is the name of one of them, whose port {PORT} the others reach."
    return f"# {launch.described}. {where}\n{line(launch)}\n"


def line(launch: Launch, ranks: str = "") -> str:
    """The line alone. On several machines it has the placeholder HOST: the machine where torchrun's agents meet.

    `ranks` replaces the number of ranks.
    """
    where = ["--standalone"] if launch.nodes == 1 else ["--nnodes", str(launch.nodes)]
    meeting = [] if launch.nodes == 1 else ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"HOST:{PORT}"]
    words = [*where, "--nproc-per-node", ranks or str(launch.ranks), *meeting, *launch.restarts]
    return shlex.join(["torchrun", *words, "-m", *launch.arguments])
