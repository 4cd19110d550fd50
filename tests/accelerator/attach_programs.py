"""`dure.attach` over parameter servers at two ranks, on the device under test and on the CPU.

    python -m accelerator.attach_programs NAME ...      one line of JSON per name: name, what each rank gave

A name is that of a case below, or a strategy. A rank trains by a strategy on the CPU and on the device, as in
`collective_programs`. Where each update is applied on arrival, ranks take turns, so that updates arrive in the same
order both times.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerator import target
from accelerator.collective_programs import (
    STEPS,
    Net,
    attach,
    batches,
    bytes_sent,
    compare,
    device,
    difference,
    on_two_ranks,
    sgd,
    synchronizations,
)
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy

from dure.errors import PeerLost

IN_TURN = ("downpour", "ssp", "easgd", "eamsgd", "k-async", "k-batch")
"""Methods of which a step waits for no other rank."""

BOTH = 2
OVERFLOWS = {1: BOTH, 3: 1}
"""Steps whose scaled gradients overflow, and at which rank."""

CASES: dict[str, Callable[[], Any]] = {}


def case(function):
    """List a case: a function that each of the two ranks calls. It returns values that JSON has."""
    CASES[function.__name__] = function
    return function


class Turns:
    """Lets one rank work at a time: rank 0, then rank 1, then rank 0. Made before the fork."""

    def __init__(self) -> None:
        self._tokens = [os.pipe() for _ in range(2)]
        os.write(self._tokens[0][1], b"!")

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Inside, the other rank waits."""
        rank = int(os.environ["RANK"])
        os.read(self._tokens[rank][0], 1)
        try:
            yield
        finally:
            os.write(self._tokens[1 - rank][1], b"!")

    def together(self) -> None:
        """Wait for the other rank."""
        for _ in range(2):
            with self.mine():
                pass


TURNS = Turns()


@contextmanager
def turn(strategy: str) -> Iterator[None]:
    """Inside is this rank's turn, if ranks take turns."""
    if not strategy.startswith(IN_TURN) or "overlap" in strategy:
        yield
        return
    with TURNS.mine():
        yield


def train(place: str, text: str) -> dict[str, Any]:
    """The results of a training at `place`; `text` is a strategy, or one and what the loop does: `bsp ps @scaler`."""
    strategy, *how = text.split(" @")
    model = Net().to(place)
    scaler = GradScaler(place.partition(":")[0], init_scale=2.0**10) if "scaler" in how else None
    losses, waits, data = [], [], list(batches(place, steps_of(how)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05) if "plain" in how else sgd(model)
    default = torch.device(place) if "default" in how else nullcontext()
    with default, attach(model, optimizer, strategy) as replica, inside(place, how):
        TURNS.together()  # both begin at the same parameters
        for step, (x, y) in enumerate(data):
            before = synchronizations()
            with torch.autocast(place.partition(":")[0], torch.bfloat16, enabled="autocast" in how):
                loss = cross_entropy(model(x), y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None and OVERFLOWS.get(step, -1) in (int(os.environ["RANK"]), BOTH):
                model.last.weight.grad[0] = torch.inf
            with turn(strategy):
                replica.step(scaler)
            waits.append(synchronizations() - before)
            if scaler is not None:
                scaler.update()
            losses.append(loss.detach())
        with turn(strategy), replica.evaluation():
            seen = model.first.weight.detach().clone()
        if "plain" in how:
            seen.zero_()  # the other rank may have pushed more, or less
        replica.close()
        values = [each.detach().double().cpu().flatten() for each in (*model.state_dict().values(), seen, *losses)]
    return {"values": torch.cat(values), "bytes": bytes_sent(replica), "waits": waits}


def steps_of(how: list[str]) -> int:
    """Rank 1 ends early where the loop says so."""
    return STEPS // 2 if "early" in how and os.environ["RANK"] == "1" else STEPS


def inside(place: str, how: list[str]) -> Any:
    """The stream that is current while the loop runs."""
    if "stream" not in how or place == "cpu":
        return nullcontext()
    stream = torch.Stream(place)
    stream.wait_stream(torch.accelerator.current_stream())
    return stream


def both_ways(strategies: list[str]) -> list[dict[str, Any]]:
    return [compare(train("cpu", text), train(device(), text)) for text in strategies]


@case
def resumed():
    """The values after a second half on the CPU, on the device after a first half on the CPU, and the other way."""
    first = {place: half(place) for place in ("cpu", device())}
    ways = [("cpu", "cpu"), ("cpu", device()), (device(), "cpu")]
    one, *others = (half(after, first[before])["values"] for before, after in ways)
    return {
        "differences": [difference(one, other) for other in others],
        "moved": difference(one, first["cpu"]["values"]),
    }


def half(place: str, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state that a user saves after some steps: that of the model and of the optimizer."""
    model = Net().to(place)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if state is not None:
        saved = torch.load(io.BytesIO(state["saved"]), map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    with attach(model, optimizer, "averaging:period=2 ps") as replica:
        for x, y in batches(place, 4):
            cross_entropy(model(x), y).backward()
            replica.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    moments = [optimizer.state[each]["exp_avg"] for each in optimizer.param_groups[0]["params"] if each.requires_grad]
    values = [each.detach().double().cpu().flatten() for each in (*model.state_dict().values(), *moments)]
    return {"saved": file.getvalue(), "values": torch.cat(values)}


@case
def crash_on_the_cpu():
    return crash("cpu")


@case
def crash_on_the_device():
    return crash(device())


@case
def crash_beside_a_server():
    """A server ends with rank 1."""
    return error_of_crash("bsp ps:shards=2")


@case
def crash_in_a_ring():
    return error_of_crash("bsp collective:algorithm=ring")


def error_of_crash(strategy: str) -> str:
    """The error of rank 0 on the device, after rank 1 is killed."""
    try:
        crash(device(), strategy)
    except PeerLost as error:
        return str(error)
    return ""


def crash(place: str, strategy: str = "bsp ps") -> list[float]:
    """The values of rank 0 after a training in which rank 1 is killed after half of the steps."""
    model = Net().to(place)
    with attach(model, sgd(model), strategy) as replica:
        for step, (x, y) in enumerate(batches(place)):
            if step == STEPS // 2 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            cross_entropy(model(x), y).backward()
            replica.step()
    return torch.cat([each.detach().double().cpu().flatten() for each in model.state_dict().values()]).tolist()


def main(names: list[str]) -> None:
    target.prepare()
    for name in names:
        work = CASES.get(name, lambda text=name: both_ways([text])[0])
        print(json.dumps([name, *on_two_ranks(work)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
