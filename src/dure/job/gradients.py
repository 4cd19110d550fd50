"""Gradients at flat parameters, one at a time or many at once.

A simulation of K workers needs K gradients of one model at K places, and the gradient of a small model costs more in
calls than in arithmetic. Which gradients are computed together follows from shapes and from how many are pending,
never from a measured time, so that a run's bits do not depend on how busy the machine was:

    | model                                            | computed                                              |
    |--------------------------------------------------|-------------------------------------------------------|
    | dense layers and element-wise activations in a   | stacked, whatever number is pending (`stacked.py`)    |
    | plain `Sequential`                               |                                                       |
    | what else `torch.func.vmap` takes                | stacked where at least LEAST_PENDING are pending      |
    | convolutions, buffers (batch norm), dropout and  | one at a time                                         |
    | other randomness, sparse gradients, and models   |                                                       |
    | of which LEAST_PENDING do not fit in MOST_BYTES  |                                                       |

Only gradients of equal shapes are stacked. Before the first of a shape is, a check computes the same works in several
compositions: if one bit depends on the company, or a result differs from the one computed alone, that shape is
computed one at a time. `GradientEngine.rule` says what was decided, for the run's record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dure.errors import UsageError
from dure.job.batched_gradients import Dense, Stacked, Vmapped, find_fault
from dure.job.data.structure import Batch, called, described, tensors
from dure.job.gradient import Gradient, GradientWork, ServerGradient
from dure.job.replica import Replica

LEAST_PENDING = 16
"""Fewer pending gradients than this are not given to vmap, and a model must fit so often in MOST_BYTES."""

MOST_BYTES = 25_000_000
"""The largest stacked tensor; beyond it, memory traffic eats what fewer calls gain."""

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class _Job(Protocol):
    """The part of a job that a gradient depends on."""

    @property
    def model(self) -> Callable[[], nn.Module]: ...

    @property
    def loss(self) -> Callable[[Any, Any], Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Decision:
    """How works of one shape are computed: by `stacked`, `most` at a time, or alone because of `why`."""

    stacked: Stacked | None
    most: int
    why: str


class GradientEngine:
    """Computes gradients of `job.loss` at any flat parameters, with one module that it keeps to itself.

    `sparse` gives the gradient of a model with sparse gradients (`nn.Embedding(sparse=True)`) as a flat sparse tensor,
    coalesced, for receivers who write only what it names.
    `exact=True` computes one at a time on one thread. No call disturbs PyTorch's global random state.
    """

    def __init__(self, job: _Job, *, exact: bool = False) -> None:
        self.job = job
        self.exact = exact
        self.sparse = False
        self.replica = Replica(self._build(0))
        self._fresh_buffers = self.replica.buffers_flat()
        self._home = self.replica.params
        self._in_place: dict[int, Tensor] = {}
        self._parameters = self.replica.parameters
        self._may_surprise = _may_surprise(self.replica)
        self._may_draw = self._may_surprise or getattr(job.loss, "__module__", "") != functional.__name__
        self._alone = "one at a time was asked for" if exact else _why_alone(self.replica)
        self._decisions: dict[Any, _Decision] = {}
        self._shapes: dict[Any, str] = {}
        self.tables: Sequence[int] = ()
        self.whole: Sequence[int] = ()
        self.ring: Sequence[int] = range(len(self._parameters))

    def split_off(self, tables: Sequence[int], whole: Sequence[int]) -> None:
        """Put the gradient of the parameters that servers hold into `Gradient.for_servers` from now on.

        `tables` are the indices of the parameters held by rows, `whole` of the others. Turns stacking off.
        """
        self.tables, self.whole = tables, whole
        self.ring = [index for index in range(len(self._parameters)) if index not in {*tables, *whole}]
        self._alone = self._alone or "servers hold a part of it"

    def initial_values(self, seed: int) -> Tensor:
        """The flat parameters of a model that is freshly made under `seed`."""
        return Replica(self._build(seed)).params

    def read_in_place(self, *vectors: Tensor) -> None:
        """Compute gradients at these flat vectors where they lie, without a copy: others may write there meanwhile."""
        self._in_place = {vector.data_ptr(): vector for vector in vectors}

    def evaluate(self, works: Sequence[GradientWork]) -> list[Gradient]:
        """The gradient of each work, in order.

        A loss that is not finite is passed on as it is. Raises `UsageError` where the loss is no single number.
        """
        results: dict[int, Gradient] = {}
        for decision, indices in self._groups(works):
            if decision.stacked is None:
                for index in indices:
                    results[index] = self._evaluate_alone(works[index])
                continue
            for part in _even_parts(indices, decision.most):
                values, losses = decision.stacked.evaluate([works[index] for index in part])
                samples = _samples(works[part[0]])
                for index, row, loss in zip(part, values.unbind(), losses, strict=True):
                    results[index] = Gradient(row, loss, samples)
        return [results[index] for index in range(len(works))]

    def one(self, work: GradientWork) -> Gradient:
        """The gradient of `work`, as `evaluate` gives it."""
        return self._evaluate_alone(work) if self._alone else self.evaluate([work])[0]

    def batches(self, works: Sequence[GradientWork]) -> bool:
        """Whether, by the rule, some of these would be computed together."""
        return any(decision.stacked is not None for decision, _ in self._groups(works))

    def backward(self, work: GradientWork, share: float) -> Gradient:
        """The gradient times `share`, added to `replica.grads`, so that hooks on parameters see it come.

        `values` of the result is `replica.grads` itself.
        """
        replica = self.replica
        for index in self.tables:
            self._parameters[index].grad = None  # else what is sparse is added to what is not
        with self._solo(work):
            loss = self._loss(work)
            torch.autograd.backward(loss * share)  # backward(share) would import all of sympy
        buffers = replica.buffers_flat() if self._fresh_buffers.numel() else None
        for_servers = self._server_gradient([each.grad for each in self._parameters])
        return Gradient(replica.grads, loss.item(), _samples(work), buffers, for_servers)

    @property
    def rule(self) -> dict[str, Any]:
        """What decides which gradients are computed together, as plain values for the run's record."""
        return {
            "exact": self.exact,
            "threads": 1 if self.exact else torch.get_num_threads(),
            "least_pending": LEAST_PENDING,
            "most_bytes": MOST_BYTES,
            "one_at_a_time": self._alone or None,
            "shapes": {
                self._shapes[signature]: f"stacked: {decision.stacked.describe}, at most {decision.most}"
                if decision.stacked
                else f"one at a time: {decision.why}"
                for signature, decision in self._decisions.items()
            },
        }

    # ---- deciding

    def _groups(self, works: Sequence[GradientWork]) -> Iterator[tuple[_Decision, list[int]]]:
        """Works that are treated alike: the decision, and their places in `works`."""
        groups: dict[Any, list[int]] = {}
        for index, work in enumerate(works):
            groups.setdefault(None if self._alone else _signature(work), []).append(index)
        for signature, indices in groups.items():
            decision = _Decision(None, 1, self._alone)
            if signature is not None:
                decision = self._decide(signature, works[indices[0]])
            if decision.stacked is not None and len(indices) < decision.stacked.least:
                decision = _Decision(None, 1, "too few are pending")
            yield decision, indices

    def _decide(self, signature: Any, work: GradientWork) -> _Decision:
        if signature not in self._decisions:
            self._decisions[signature] = self._try(work)
            self._shapes[signature] = f"inputs {described(work.inputs)}, targets {described(work.targets)}"
        return self._decisions[signature]

    def _try(self, work: GradientWork) -> _Decision:
        """The first way of stacking that gives the same bits in any company."""
        assert work.inputs is not None
        assert work.targets is not None
        largest = max(each.nbytes for each in (work.values, *tensors(work.inputs), *tensors(work.targets)))
        most = MOST_BYTES // max(largest, 1)
        if most < LEAST_PENDING:
            return _Decision(None, 1, f"{LEAST_PENDING} times {largest} bytes are more than {MOST_BYTES}")
        faults = []
        for stacked in self._ways(work):
            fault = find_fault(stacked, work, most, self._evaluate_alone)
            if fault is None:
                return _Decision(stacked, most, "")
            faults.append(f"{stacked.describe}: {fault}")
        return _Decision(None, 1, "; ".join(faults))

    def _ways(self, work: GradientWork) -> Iterator[Stacked]:
        for fewest in (1, 2):  # where a single row takes another kernel, it is given company
            dense = Dense.of(self.replica, self.job.loss, work, fewest)
            if dense is not None:
                yield dense
        yield Vmapped(self.replica, self.job.loss, LEAST_PENDING)

    # ---- one at a time

    def _evaluate_alone(self, work: GradientWork) -> Gradient:
        replica, parameters = self.replica, self._parameters
        with self._solo(work):
            loss = self._loss(work)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=self._may_surprise)
        if not (self.tables or self.whole or self._may_surprise):
            values = torch.cat([gradient.reshape(-1) for gradient in gradients])
        elif self.sparse and not (self.tables or self.whole) and any(g is not None and g.is_sparse for g in gradients):
            values = _flat_sparse(gradients, replica)
        else:
            values = self._flat_of(gradients, self.ring)
        buffers = replica.buffers_flat() if self._fresh_buffers.numel() else None
        return Gradient(values, loss.item(), _samples(work), buffers, self._server_gradient(gradients))

    def _server_gradient(self, gradients: Sequence[Tensor | None]) -> ServerGradient | None:
        """The gradient of the parameters that servers hold; None where they hold none."""
        if not (self.tables or self.whole):
            return None
        rows = [_rows(gradients[index], self._parameters[index]) for index in self.tables]
        return ServerGradient(rows, self._flat_of(gradients, self.whole))

    def _flat_of(self, gradients: Sequence[Tensor | None], indices: Sequence[int]) -> Tensor:
        parts = [_flat(gradients[index], self._parameters[index]) for index in indices]
        return torch.cat(parts) if parts else self.replica.params.new_empty(0)

    def _solo(self, work: GradientWork) -> _Solo:
        return _Solo(self.exact, _mix(work) if self._may_draw else None, self.replica.device)

    def _loss(self, work: GradientWork) -> Tensor:
        """The forward pass of `work`, with its parameters and its buffers: a tensor of no dimensions."""
        assert work.inputs is not None
        replica = self.replica
        self._stand_on(work.values)
        if self._fresh_buffers.numel():
            replica.load_buffers(self._fresh_buffers if work.buffers is None else work.buffers)
        loss: Tensor = self.job.loss(called(replica.module, work.inputs), work.targets)
        if loss.numel() != 1:
            raise UsageError(
                f"a job's loss must be one number, the mean over the batch; got shape {tuple(loss.shape)}. "
                "Write loss=lambda outputs, targets: (...).mean()."
            )
        return loss.reshape(()) if loss.dim() else loss

    def _stand_on(self, values: Tensor) -> None:
        """Have the module's parameters be `values`: by copying, but for those that are read in place."""
        replica = self.replica
        place = values.data_ptr()
        if place == replica.params.data_ptr():
            return
        if self._in_place:
            there = self._in_place.get(place)
            replica.move_to(self._home if there is None else there)
            if there is not None:
                return
        replica.load(values)

    def _build(self, seed: int) -> nn.Module:
        with _Solo(False, seed, torch.device("cpu")):
            return self.job.model()


def _why_alone(replica: Replica) -> str:
    """Why this model's gradients are never stacked; empty if they may be."""
    modules = list(replica.module.modules())
    if replica.is_stochastic:
        return "the model draws random numbers"
    if replica.has_batch_norm or replica.buffers_flat().numel():
        return "the model has buffers that training may change"
    if any(_has_hooks(module) for module in modules) or any(each._backward_hooks for each in replica.parameters):
        return "the model has hooks"
    if any(isinstance(module, _CONVOLUTIONS) for module in modules):
        return "the model has convolutions"
    if _has_sparse(modules):
        return "the model has sparse gradients"
    return ""


def _has_sparse(modules: Sequence[nn.Module]) -> bool:
    return any(module.sparse for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag))


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _samples(work: GradientWork) -> int:
    assert work.targets is not None
    return len(tensors(work.targets)[0])


def _signature(work: GradientWork) -> tuple[Any, ...]:
    """Structure, shapes and dtypes of a work's inputs and targets."""
    assert work.inputs is not None
    assert work.targets is not None
    return _shape(work.inputs), _shape(work.targets)


def _shape(batch: Batch) -> tuple[Any, ...]:
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    keys = tuple(batch) if isinstance(batch, Mapping) else None
    return (keys, *((each.shape, each.dtype) for each in tensors(batch)))


def _even_parts(indices: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """As few parts as hold at most `most` each, of sizes that differ by at most one."""
    parts = -(-len(indices) // most)
    for number in range(parts):
        yield indices[len(indices) * number // parts : len(indices) * (number + 1) // parts]


def _flat(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """A parameter that the loss does not depend on has the gradient zero."""
    if gradient is None:
        return torch.zeros_like(parameter).reshape(-1)
    return (gradient.to_dense() if gradient.layout != torch.strided else gradient).reshape(-1)


def _rows(gradient: Tensor | None, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """The rows of a gradient that may differ from zero, each once, ascending; and their values (count, width)."""
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64)
        return rows, parameter.detach().reshape(len(parameter), -1)[rows]
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows = gradient.indices()[0]
        return rows, gradient.values().reshape(len(rows), -1)
    table = gradient.reshape(len(gradient), -1)
    rows = table.any(dim=1).nonzero().squeeze(1)
    return rows, table[rows]


def _flat_sparse(gradients: Sequence[Tensor | None], replica: Replica) -> Tensor:
    """Only the numbers that the gradient may differ from zero in: rows of sparse parameters, all of the others."""
    indices, values = [], []
    for gradient, layer in zip(gradients, replica.layers, strict=True):
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, width = gradient.indices()[0], layer.numel // layer.shape[0]
            indices.append((layer.start + rows.unsqueeze(1) * width + torch.arange(width)).reshape(-1))
            values.append(gradient.values().reshape(-1))
        else:
            indices.append(torch.arange(layer.start, layer.stop))
            values.append(gradient.reshape(-1))
    return torch.sparse_coo_tensor(
        torch.cat(indices).unsqueeze(0), torch.cat(values), (replica.numel,), is_coalesced=True, check_invariants=False
    )


def _mix(work: GradientWork) -> int:
    """A random state for this worker's step alone; PyTorch's CPU generator uses 32 bits of it."""
    text = f"{work.seed}/{work.rank}/{work.step}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _may_surprise(replica: Replica) -> bool:
    """Whether a pass may draw random numbers, or leave gradients sparse or out. PyTorch's layers in a row do not."""
    modules = list(replica.module.modules())
    return replica.is_stochastic or _has_sparse(modules) or not all(_is_plain(module) for module in modules)


def _is_plain(module: nn.Module) -> bool:
    """Whether it is one of PyTorch's own layers, or some in a row, and does what it always does."""
    own = type(module).__module__.startswith("torch.nn.modules.") and not list(module.children())
    return (own or type(module) is nn.Sequential) and not _has_hooks(module)


class _Solo:
    """Around one computation: gradients are on, PyTorch's generators are seeded with `seed` if there is one, and one
    thread is used if `exact`; afterwards all is as it was. A class, since three generators here take a tenth of a
    small model's step.
    """

    __slots__ = ("_device", "_exact", "_fork", "_grad", "_seed", "_state", "_threads")

    def __init__(self, exact: bool, seed: int | None, device: torch.device) -> None:
        self._exact = exact
        self._seed = seed
        self._device = device

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads() if self._exact else 1
        if self._threads != 1:
            torch.set_num_threads(1)
        self._grad = torch.is_grad_enabled()
        if not self._grad:
            torch.set_grad_enabled(True)
        if self._seed is None:
            return
        if self._device.type == "cpu":
            self._state = torch.get_rng_state()  # a fiftieth of what fork_rng costs
            torch.default_generator.manual_seed(self._seed)
        else:
            self._fork = torch.random.fork_rng([self._device], device_type=self._device.type)
            self._fork.__enter__()
            torch.manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        if self._seed is not None and self._device.type == "cpu":
            torch.set_rng_state(self._state)
        elif self._seed is not None:
            self._fork.__exit__(*error)
        if not self._grad:
            torch.set_grad_enabled(False)
        if self._threads != 1:
            torch.set_num_threads(self._threads)
