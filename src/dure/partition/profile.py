"""Profiles of a model's blocks: the time and the sizes from which the stages of a pipeline are planned (`cut.py`).

`counted` counts floating-point operations, so equal models have equal profiles on every machine; virtual time uses it.
`timed` measures the blocks where they will run. Both compute the first samples of the job's data, block after block, in
the mode of the modules, and leave buffers and random state as they were.

Where seconds are measured, a block costs a call, whatever the number of samples, and each sample (`BlockTimes`):

    seconds of a pass of n samples through a block  =  call + n * sample

A mini-batch that is cut into U micro-batches pays U calls. So small micro-batches are inefficient.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dure.core.flop_counter import FlopCounter
from dure.core.user_code import explain_user_errors
from dure.core.validated import read_yaml_file
from dure.errors import UsageError
from dure.partition.blocks import block_name, call_of, first_samples
from dure.partition.borders import Call, with_kept

if TYPE_CHECKING:
    from dure.job.job import Job


class PassTime(NamedTuple):
    """Seconds of a forward or a backward through a block: of a call, and of each sample in it."""

    call: float
    sample: float


class BlockTimes(NamedTuple):
    """The seconds of each block's forward and backward."""

    forward: Sequence[PassTime]
    backward: Sequence[PassTime]


class PassShare(NamedTuple):
    """The share of a stage in the time of the model's pass: of calls, and of work that grows with the samples."""

    call: float
    work: float

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.call + self.work

    def split(self, fraction: float) -> float:
        """The factor of a worker with this fraction of the work: it makes all calls."""
        return (self.call + self.work * fraction) / self.total if self.total else fraction


def share(times: Sequence[PassTime], blocks: Iterable[int], rows: int, batch: int) -> PassShare:
    """The share of a pass of `rows` samples through some `blocks` in a pass of `batch` samples through all.

    >>> share([PassTime(1.0, 0.5), PassTime(1.0, 1.0)], [0], rows=2, batch=4)
    PassShare(call=0.125, work=0.125)
    """
    own = [times[number] for number in blocks]
    whole = sum(each.call + batch * each.sample for each in times)
    return PassShare(sum(each.call for each in own) / whole, sum(rows * each.sample for each in own) / whole)


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """A block: seconds of forward and backward of one mini-batch, and sizes in bytes.

    `output_nbytes` counts all tensors that go to the next block, `parameter_nbytes` trainable parameters, and
    `activation_nbytes` the tensors that forward keeps for backward. A tensor that two blocks keep counts in each.
    """

    seconds: float
    output_nbytes: int = 0
    parameter_nbytes: int = 0
    activation_nbytes: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise UsageError(f"{field.name} of a block must be a number that is not negative, got {value!r}.")


@dataclass(frozen=True, slots=True)
class Profile:
    """The blocks of a model for mini-batches of `samples`."""

    blocks: tuple[BlockProfile, ...]
    samples: int = 0

    def trains(self, start: int, stop: int) -> bool:
        """Whether blocks `start` to `stop` - 1 have trainable parameters."""
        return any(block.parameter_nbytes for block in self.blocks[start:stop])

    def taking(self, seconds: Sequence[float]) -> Profile:
        """This profile with the times of the blocks replaced by `seconds`."""
        pairs = zip(self.blocks, seconds, strict=True)
        return replace(self, blocks=tuple(replace(block, seconds=each) for block, each in pairs))

    def lasting(self, seconds: float) -> Profile:
        """This profile with all times multiplied by a factor, so that the blocks take `seconds` together."""
        factor = seconds / math.fsum(block.seconds for block in self.blocks)
        return self.taking([block.seconds * factor for block in self.blocks])

    def joined(self, starts: Sequence[int]) -> Profile:
        """This profile with the blocks from each of `starts` up to the next as one block."""
        groups = [self.blocks[start:stop] for start, stop in pairwise((*starts, len(self.blocks)))]
        return replace(self, blocks=tuple(_one_block(group) for group in groups))

    def write(self, path: Path) -> None:
        """Write the profile as JSON, which `read` and every reader of YAML accept."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile in JSON or YAML. Raises `UsageError` for a file that has none."""
        try:
            found = read_yaml_file(path)
        except ValueError as error:
            raise UsageError(
                f"the profile {path} cannot be read: {error}. Name a file that Profile.write has written, or cut by "
                "the counted operations with cuts=profile."
            ) from error
        try:
            return cls(tuple(BlockProfile(**_mapping(each)) for each in found["blocks"]), found.get("samples", 0))
        except (TypeError, KeyError, AttributeError) as error:
            known = ", ".join(field.name for field in fields(BlockProfile))
            raise UsageError(
                f"{path} is no profile ({error}): it needs a list `blocks`, whose entries have {known}."
            ) from error
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error


def _one_block(blocks: Sequence[BlockProfile]) -> BlockProfile:
    """Consecutive blocks as one."""
    return BlockProfile(
        sum(each.seconds for each in blocks),
        output_nbytes=blocks[-1].output_nbytes,
        parameter_nbytes=sum(each.parameter_nbytes for each in blocks),
        activation_nbytes=sum(each.activation_nbytes for each in blocks),
        name=blocks[0].name,
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r:.40} is no block")
    return value


# ---- measuring


def counted(job: Job, blocks: Sequence[nn.Module], samples: int, *, flops: float = 1.0) -> Profile:
    """The profile of the blocks on a machine of `flops` operations per second, for mini-batches of `samples`.

    Operations are those of `Job.flops_per_sample`: matrix products and convolutions, forward and backward. If the model
    has none, a block is charged six operations per parameter and sample.
    """

    def operations(step: Callable[[], None]) -> float:
        with FlopCounter() as counter:
            step()
        return float(counter.get_total_flops()) / flops

    found = _profile(job, blocks, samples, operations)
    if any(block.seconds for block in found.blocks):
        return found
    sizes = [sum(each.numel() for each in block.parameters()) for block in blocks]
    charged = [
        replace(block, seconds=6.0 * size * samples / flops) for block, size in zip(found.blocks, sizes, strict=True)
    ]
    return replace(found, blocks=tuple(charged))


def timed(
    job: Job, blocks: Sequence[nn.Module], samples: int, *, clock: Callable[[], float], repeats: int = 5
) -> Profile:
    """The profile of the blocks on this machine: medians of `repeats` computations, after one that is not counted.

    `clock` returns seconds. On an accelerator it first waits for the device.
    """

    def seconds(step: Callable[[], None]) -> float:
        step()
        spent = []
        for _ in range(repeats):
            start = clock()
            step()
            spent.append(clock() - start)
        return statistics.median(spent)

    return _profile(job, blocks, samples, seconds)


_Cost = Callable[[Callable[[], None]], float]
"""Calls its argument, forward and backward of a block, and returns the cost."""


def _profile(job: Job, blocks: Sequence[nn.Module], samples: int, cost: _Cost) -> Profile:
    call, found = call_of(job), []
    value: Any
    device = next(each for block in blocks for each in block.parameters()).device
    value, _ = first_samples(job, samples, device)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _restoring_buffers(blocks):
        for number, block in enumerate(blocks):
            value, profile = _profile_block(block, block_name(number, block), call, tree_map(_detached, value), cost)
            found.append(profile)
    return Profile(tuple(found), samples)


def _profile_block(block: nn.Module, name: str, call: Call, inputs: Any, cost: _Cost) -> tuple[Any, BlockProfile]:
    """The outputs of a block, with their graph, and its profile."""
    with explain_user_errors(f"{name} raised"):
        outputs, kept = with_kept(block, [], lambda: call(block, tree_map(_cloned, inputs)))
        leaves = [each for each in (*_tensors(inputs), *block.parameters()) if each.requires_grad]

        def step() -> None:
            arguments = tree_map(_cloned, inputs)  # no leaves: a block may change its inputs in place
            roots = [each for each in _tensors(call(block, arguments)) if each.requires_grad]
            if roots and leaves:
                torch.autograd.grad(roots, leaves, [torch.ones_like(each) for each in roots], allow_unused=True)

        seconds = cost(step)
    return outputs, BlockProfile(
        seconds,
        output_nbytes=sum(each.nbytes for each in _tensors(outputs)),
        parameter_nbytes=sum(each.nbytes for each in block.parameters() if each.requires_grad),
        activation_nbytes=sum(kept.values()),
        name=name,
    )


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _detached(value: Any) -> Any:
    """A tensor without its graph, which needs a gradient if the tensor has one: not integers, masks or inputs."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


@contextmanager
def _restoring_buffers(blocks: Sequence[nn.Module]) -> Iterator[None]:
    before = [(each, each.clone()) for block in blocks for each in block.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
