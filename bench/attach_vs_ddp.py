"""`dure.attach` with BSP against DistributedDataParallel in a loop of nanoGPT's shape, on a small GPT over characters.

    python bench/attach_vs_ddp.py [--workers 2] [--steps 5] [--repeats 40] [--micro-batches 4] [--json FILE]

The loop gathers the gradients of four micro-batches of 4 windows of 32 characters, clips their norm to 1, and steps
AdamW; the model has 4 layers of width 128. Under DDP the first three backwards run without synchronization, as in
nanoGPT; under attach they are inside `replica.accumulate()`.

The same processes, one thread each, hold both; each repeat trains so many iterations with one, then with the other, in
alternating order. Same initial values, same batches, same rates: at the end both must have the same parameters. The
ratio is DDP's time over attach's: above 1, attach is the faster one. Its 95 % interval is that of the median.
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import nullcontext

import torch
from _char_gpt import GPT, loss_of, text
from _script import parse, print_ratios, told
from _side_by_side import (
    Arm,
    Measured,
    free_port,
    in_processes,
    must_agree,
    options,
    take_turns,
    warm_up,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import dure

BATCH, LENGTH = 4, 32


class NanoLoop:
    """The parts that both arms share: model, optimizer, data."""

    def __init__(self, rank: int, micro_batches: int) -> None:
        self.characters, vocabulary = text()
        torch.manual_seed(0)
        self.model: torch.nn.Module = GPT(vocabulary, length=LENGTH)
        matrices = [each for each in self.model.parameters() if each.dim() > 1]
        vectors = [each for each in self.model.parameters() if each.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
        self.micro_batches = micro_batches
        self.draw = torch.Generator().manual_seed(1337 + rank)

    def backward(self) -> None:
        starts = torch.randint(len(self.characters) - LENGTH, (BATCH,), generator=self.draw)
        x = torch.stack([self.characters[start : start + LENGTH] for start in starts])
        y = torch.stack([self.characters[start + 1 : start + LENGTH + 1] for start in starts])
        (loss_of(self.model(x), y) / self.micro_batches).backward()  # type: ignore[no-untyped-call]

    @property
    def params(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


class WithDDP(NanoLoop):
    def __init__(self, rank: int, micro_batches: int) -> None:
        super().__init__(rank, micro_batches)
        self.model = self.ddp = DistributedDataParallel(self.model)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for micro_step in range(self.micro_batches):
                self.ddp.require_backward_grad_sync = micro_step == self.micro_batches - 1
                self.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


class WithAttach(NanoLoop):
    def __init__(self, rank: int, micro_batches: int) -> None:
        super().__init__(rank, micro_batches)
        self.replica = dure.attach(self.model, self.optimizer, sync="bsp")

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for micro_step in range(self.micro_batches):
                last = micro_step == self.micro_batches - 1
                with nullcontext() if last else self.replica.accumulate():
                    self.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.replica.step()


def measure(rank: int, given: argparse.Namespace) -> Measured:
    """One of the processes."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(given.workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(given.port),
    }
    attached = WithAttach(rank, given.micro_batches)
    arms: dict[str, Arm] = {"DistributedDataParallel": WithDDP(rank, given.micro_batches), "attach": attached}
    warm_up(arms, given.steps)
    seconds = take_turns(arms, given.steps, given.repeats)
    must_agree(arms, "attach", "DistributedDataParallel")
    attached.replica.close()
    samples = given.steps * given.workers * given.micro_batches * BATCH
    return Measured("Python's manual, by characters", samples, seconds)


def main() -> None:
    parser = options(__doc__, job="char-gpt", steps=5, repeats=40)
    parser.add_argument("--micro-batches", type=int, default=4)
    given = parse(parser, steps=1, repeats=2)
    given.port = free_port()
    with told("attach_vs_ddp", given) as facts:
        measured = in_processes(measure, given)
        ratios = measured.ratios([("attach", "DistributedDataParallel")], given.job)
        milliseconds = {
            name: round(1e3 * statistics.median(taken) / given.steps, 2) for name, taken in measured.seconds.items()
        }
        print(f"{measured.source}; {given.workers} processes, {given.repeats} pairs of {given.steps} iterations")
        print(", ".join(f"{each} ms an iteration with {name}" for name, each in milliseconds.items()))
        print_ratios(ratios)
        facts |= {
            "workers": given.workers,
            "repeats": given.repeats,
            "milliseconds": milliseconds,
            "ratios": ratios,
        }


if __name__ == "__main__":
    main()
