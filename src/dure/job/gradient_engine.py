"""The gradient engine: computes gradients at flat parameters, one at a time or many at once.

A simulation of K workers needs K gradients of one model at K points, and the gradient of a small model costs more in
calls than in arithmetic. So the engine stacks gradients. Its choice follows from shapes and from the number of pending
gradients, never from a measured time, so that the bits of a run do not depend on the load of the machine:

    | model                                            | computed                                              |
    |--------------------------------------------------|-------------------------------------------------------|
    | dense layers and element-wise activations in a   | stacked, for any number of pending gradients          |
    | plain `Sequential`                               | (`Dense` in `stacked_gradients.py`)                   |
    | other models that `torch.func.vmap` supports     | stacked, if at least LEAST_PENDING are pending        |
    |                                                  | (`Vmapped`)                                           |
    | convolutions, buffers (batch norm), dropout and  | one at a time                                         |
    | other randomness, sparse gradients, and models   |                                                       |
    | of which LEAST_PENDING do not fit in MOST_BYTES  |                                                       |

On an accelerator a stack may take a share of the memory that is free when the engine stacks for the first time, in
place of MOST_BYTES. There one transfer brings all losses of a call to the host, with the norm of its gradients.

Only gradients of equal shapes are stacked. Before the first stack of a shape, a check computes the same works in
several stacks (`find_fault`). If a bit depends on the other works of a stack, or a result differs from the one
computed alone, the engine computes this shape one at a time. `GradientEngine.rule` reports the choices for the run's
record.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dure.errors import UsageError
from dure.job.data.dataset import Batch, called, described, tensors
from dure.job.gradient import Gradient, GradientWork, ServerGradient
from dure.job.replica import Replica, has_hooks
from dure.job.stacked_gradients import Dense, Stacked, Vmapped, find_fault

LEAST_PENDING = 16
"""Least number of pending gradients for vmap. As many stacked models must fit in MOST_BYTES."""

MOST_BYTES = 25_000_000
"""Size of the largest stacked tensor on a CPU. Beyond it, memory traffic costs more than fewer calls save."""

SHARE = 8
"""On an accelerator, the largest stacked tensor takes one part in so many of the free memory.

A stack holds several tensors of this size at once: parameters, gradients, and the gradients of its layers.
"""

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
    """The way to compute works of one shape: by `stacked`, `most` at a time, or alone for the reason `why`."""

    stacked: Stacked | None
    most: int
    why: str


class _Computed(NamedTuple):
    """Gradients whose losses the host has not read yet; `losses` holds one for each, or is the only one."""

    gradients: Sequence[Gradient]
    losses: Tensor


class GradientEngine:
    """Computes gradients of `job.loss` at any flat parameters, with a module of its own on `device`.

    The values of frozen parameters and of constants are those of a model made under `seed`.

    `exact=True` computes one at a time on one thread. With `sparse`, a model with sparse gradients
    (`nn.Embedding(sparse=True)`) gives a flat sparse tensor, coalesced, so that receivers write only its entries. No
    call changes PyTorch's global random state. Random layers draw other numbers on an accelerator than on the CPU.
    """

    def __init__(self, job: _Job, *, exact: bool = False, device: str = "cpu", seed: int = 0) -> None:
        self.job = job
        self.exact = exact
        self.sparse = False
        self.replica = Replica(self._build(seed).to(device))
        self._fresh_buffers = self.replica.buffers_flat()
        self._home = self.replica.params
        self._in_place: dict[int, Tensor] = {}
        self._parameters = self.replica.parameters
        self._is_irregular = _is_irregular(self.replica)
        # PyTorch's own losses draw no random numbers; without draws a computation saves the time of a seed.
        self._may_draw = self._is_irregular or getattr(job.loss, "__module__", "") != functional.__name__
        self._alone = "one at a time was asked for" if exact else _why_alone(self.replica)
        self._decisions: dict[Any, _Decision] = {}
        self._shapes: dict[Any, str] = {}
        self.tables: Sequence[int] = ()
        self.whole: Sequence[int] = ()
        self._own: Sequence[int] = range(len(self._parameters))

    def split_off(self, tables: Sequence[int], whole: Sequence[int]) -> None:
        """Put the gradient of the parameters that servers hold into `Gradient.for_servers` from now on.

        `tables` are the indices of the parameters held by rows, `whole` of the others. Turns stacking off.
        """
        self.tables, self.whole = tables, whole
        self._own = [index for index in range(len(self._parameters)) if index not in {*tables, *whole}]
        self._alone = self._alone or "servers hold a part of it"

    def initial_values(self, seed: int) -> Tensor:
        """The flat parameters of a new model made under `seed`."""
        return Replica(self._build(seed)).params

    def read_in_place(self, *vectors: Tensor) -> None:
        """Read these flat parameters in place from now on, without a copy, even if other threads or processes write."""
        self._in_place = {vector.data_ptr(): vector for vector in vectors}

    def evaluate(self, works: Sequence[GradientWork]) -> list[Gradient]:
        """Compute the gradient of each work, in order.

        A loss may be NaN or infinity. Raises `UsageError` for a loss that is no single number.
        """
        results: dict[int, Gradient] = {}
        computed: list[_Computed] = []
        for decision, indices in self._groups(works):
            if decision.stacked is None:
                for index in indices:
                    computed.append(self._compute_alone(works[index]))
                    (results[index],) = computed[-1].gradients
                continue
            for part in _even_parts(indices, decision.most):
                computed.append(_stacked(decision.stacked, [works[index] for index in part]))
                results |= zip(part, computed[-1].gradients, strict=True)
        _read_losses(computed)
        return [results[index] for index in range(len(works))]

    def one(self, work: GradientWork) -> Gradient:
        """Compute the gradient of one work, as `evaluate`."""
        return self._evaluate_alone(work) if self._alone else self.evaluate([work])[0]

    def batches(self, works: Sequence[GradientWork]) -> bool:
        """Whether `evaluate` would stack some of these works."""
        return any(decision.stacked is not None for decision, _ in self._groups(works))

    def backward(self, work: GradientWork, share: float) -> Gradient:
        """Add `share` times the gradient to `replica.grads` by a backward pass, which runs the hooks of parameters.

        `values` of the result is `replica.grads` itself.
        """
        replica = self.replica
        for index in self.tables:
            self._parameters[index].grad = None  # else autograd adds a sparse gradient to a dense one
        with self._isolated(work):
            loss = self._loss(work)
            torch.autograd.backward(loss * share)  # backward(share) would import all of sympy
        buffers = replica.buffers_flat() if self._fresh_buffers.numel() else None
        for_servers = self._server_gradient([each.grad for each in self._parameters])
        return Gradient(replica.grads, loss.item(), _samples(work), buffers, for_servers)

    @property
    def rule(self) -> dict[str, Any]:
        """The rule of stacking and its choices so far, as plain values for the run's record."""
        return {
            "exact": self.exact,
            "threads": 1 if self.exact else torch.get_num_threads(),
            "least_pending": LEAST_PENDING,
            "most_bytes": self._most_bytes,
            "one_at_a_time": self._alone or None,
            "shapes": {
                self._shapes[signature]: f"stacked: {decision.stacked.describe}, at most {decision.most}"
                if decision.stacked
                else f"one at a time: {decision.why}"
                for signature, decision in self._decisions.items()
            },
        }

    # ---- the choice of stacking

    def _groups(self, works: Sequence[GradientWork]) -> Iterator[tuple[_Decision, list[int]]]:
        """Groups of works with one decision: the decision, and the indices of the works."""
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

    @cached_property
    def _most_bytes(self) -> int:
        """Size of the largest stacked tensor. On an accelerator a power of two, so that it is equal in most runs."""
        device = self.replica.device
        if device.type == "cpu":
            return MOST_BYTES
        free, _ = torch.accelerator.get_memory_info(device)
        return 1 << (max(free // SHARE, 1).bit_length() - 1)

    def _try(self, work: GradientWork) -> _Decision:
        """The first way of stacking whose bits do not depend on the other works of a stack."""
        assert work.inputs is not None
        assert work.targets is not None
        largest = max(each.nbytes for each in (work.values, *tensors(work.inputs), *tensors(work.targets)))
        most = self._most_bytes // max(largest, 1)
        if most < LEAST_PENDING:
            return _Decision(None, 1, f"{LEAST_PENDING} times {largest} bytes are more than {self._most_bytes}")
        faults = []
        for stacked in self._ways(work):
            fault = find_fault(stacked, work, most, self._evaluate_alone)
            if fault is None:
                return _Decision(stacked, most, "")
            faults.append(f"{stacked.describe}: {fault}")
        return _Decision(None, 1, "; ".join(faults))

    def _ways(self, work: GradientWork) -> Iterator[Stacked]:
        for fewest in (1, 2):  # a single row may run another kernel; then the second way pads it to two
            dense = Dense.of(self.replica, self.job.loss, work, fewest)
            if dense is not None:
                yield dense
        yield Vmapped(self.replica, self.job.loss, LEAST_PENDING)

    # ---- one at a time

    def _evaluate_alone(self, work: GradientWork) -> Gradient:
        computed = self._compute_alone(work)
        _read_losses([computed])
        return computed.gradients[0]

    def _compute_alone(self, work: GradientWork) -> _Computed:
        replica, parameters = self.replica, self._parameters
        with self._isolated(work):
            loss = self._loss(work)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=self._is_irregular)
        if not (self.tables or self.whole or self._is_irregular):
            values = torch.cat([gradient.reshape(-1) for gradient in gradients])
        elif self.sparse and not (self.tables or self.whole) and any(g is not None and g.is_sparse for g in gradients):
            values = _flat_sparse(gradients, replica)
        else:
            values = self._flat_of(gradients, self._own)
        buffers = replica.buffers_flat() if self._fresh_buffers.numel() else None
        gradient = Gradient(values, math.nan, _samples(work), buffers, self._server_gradient(gradients))
        return _Computed((gradient,), loss)

    def _server_gradient(self, gradients: Sequence[Tensor | None]) -> ServerGradient | None:
        """The gradient of the parameters that servers hold; None where they hold none."""
        if not (self.tables or self.whole):
            return None
        rows = [_rows(gradients[index], self._parameters[index]) for index in self.tables]
        return ServerGradient(rows, self._flat_of(gradients, self.whole))

    def _flat_of(self, gradients: Sequence[Tensor | None], indices: Sequence[int]) -> Tensor:
        parts = [_flat(gradients[index], self._parameters[index]) for index in indices]
        return torch.cat(parts) if parts else self.replica.params.new_empty(0)

    def _isolated(self, work: GradientWork) -> Isolated:
        seed = seed_of(work.seed, work.rank, work.step) if self._may_draw else None
        return Isolated(self.exact, seed, self.replica.device)

    def _loss(self, work: GradientWork) -> Tensor:
        """Run the forward pass of `work` with its parameters and buffers. Returns a scalar tensor."""
        assert work.inputs is not None
        replica = self.replica
        self._use(work.values)
        if self._fresh_buffers.numel():
            replica.load_buffers(self._fresh_buffers if work.buffers is None else work.buffers)
        loss: Tensor = self.job.loss(called(replica.module, work.inputs), work.targets)
        if loss.numel() != 1:
            raise UsageError(
                f"a job's loss must be one number, the mean over the batch; got shape {tuple(loss.shape)}. "
                "Write loss=lambda outputs, targets: (...).mean()."
            )
        return loss.reshape(()) if loss.dim() else loss

    def _use(self, values: Tensor) -> None:
        """Set the module's parameters to `values`: in place if `read_in_place` has named them, else by a copy."""
        replica = self.replica
        place = values.data_ptr()
        if place == replica.params.data_ptr():
            return
        if self._in_place:
            # The address identifies the memory: the caller may pass another tensor over it.
            there = self._in_place.get(place)
            replica.move_to(self._home if there is None else there)
            if there is not None:
                return
        replica.load(values)

    def _build(self, seed: int) -> nn.Module:
        with Isolated(False, seed, torch.device("cpu")):
            return self.job.model()


def _why_alone(replica: Replica) -> str:
    """The reason never to stack this model's gradients; empty if there is none."""
    modules = list(replica.module.modules())
    if replica.is_stochastic:
        return "the model draws random numbers"
    if replica.has_batch_norm or replica.buffers_flat().numel():
        return "the model has buffers that training may change"
    if any(has_hooks(module) for module in modules) or any(each._backward_hooks for each in replica.parameters):
        return "the model has hooks"
    if any(isinstance(module, _CONVOLUTIONS) for module in modules):
        return "the model has convolutions"
    if _has_sparse(modules):
        return "the model has sparse gradients"
    return ""


def _has_sparse(modules: Sequence[nn.Module]) -> bool:
    return any(module.sparse for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag))


def _stacked(stacked: Stacked, works: Sequence[GradientWork]) -> _Computed:
    values, losses = stacked.evaluate(works)
    samples = _samples(works[0])
    return _Computed([Gradient(row, math.nan, samples) for row in values.unbind()], losses)


def _read_losses(computed: Sequence[_Computed]) -> None:
    """Set the loss of each gradient. On an accelerator one transfer brings all losses, and a check of all values.

    The norm of all gradients together is finite only if each gradient is. Where it is not, receivers check each one.
    """
    if not computed:
        return
    if computed[0].losses.is_cpu:
        for gradients, losses in computed:
            if not losses.dim():
                gradients[0].loss = losses.item()
                continue
            for gradient, loss in zip(gradients, losses.tolist(), strict=True):
                gradient.loss = loss
        return
    together = [gradient for gradients, _ in computed for gradient in gradients]
    values = [each.values.values() if each.values.is_sparse else each.values for each in together]
    parts = [losses.reshape(-1) for _, losses in computed]
    *read, norm = torch.cat([*parts, torch.nn.utils.get_total_norm(values).reshape(1)]).tolist()
    for gradient, loss in zip(together, read, strict=True):
        gradient.loss, gradient.checked = loss, math.isfinite(norm)


def _samples(work: GradientWork) -> int:
    assert work.targets is not None
    return len(tensors(work.targets)[0])


def _signature(work: GradientWork) -> tuple[Any, ...]:
    """The structure, shapes and dtypes of the inputs and targets of a work."""
    assert work.inputs is not None
    assert work.targets is not None
    return _shape(work.inputs), _shape(work.targets)


def _shape(batch: Batch) -> tuple[Any, ...]:
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    keys = tuple(batch) if isinstance(batch, Mapping) else None
    return (keys, *((each.shape, each.dtype) for each in tensors(batch)))


def _even_parts(indices: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Divide `indices` into the fewest parts of at most `most` each, whose sizes differ by at most one."""
    parts = -(-len(indices) // most)
    for number in range(parts):
        yield indices[len(indices) * number // parts : len(indices) * (number + 1) // parts]


def _flat(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """Flatten a gradient. None, for a parameter that the loss does not depend on, becomes zeros."""
    if gradient is None:
        return torch.zeros_like(parameter).reshape(-1)
    return (gradient.to_dense() if gradient.layout != torch.strided else gradient).reshape(-1)


def _rows(gradient: Tensor | None, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """The ascending indices (count) of a gradient's rows that may differ from zero, and their values (count, width)."""
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return rows, parameter.detach().reshape(len(parameter), -1)[rows]
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows = gradient.indices()[0]
        return rows, gradient.values().reshape(len(rows), -1)
    table = gradient.reshape(len(gradient), -1)
    rows = table.any(dim=1).nonzero().squeeze(1)
    return rows, table[rows]


def _flat_sparse(gradients: Sequence[Tensor | None], replica: Replica) -> Tensor:
    """The flat sparse gradient: the rows of sparse parameters that may differ from zero, and all other parameters."""
    indices, values = [], []
    for gradient, layer in zip(gradients, replica.layers, strict=True):
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, width = gradient.indices()[0], layer.numel // layer.shape[0]
            columns = torch.arange(width, device=rows.device)
            indices.append((layer.start + rows.unsqueeze(1) * width + columns).reshape(-1))
            values.append(gradient.values().reshape(-1))
        else:
            indices.append(torch.arange(layer.start, layer.stop, device=replica.device))
            values.append(gradient.reshape(-1))
    return torch.sparse_coo_tensor(
        torch.cat(indices).unsqueeze(0), torch.cat(values), (replica.numel,), is_coalesced=True, check_invariants=False
    )


def _is_irregular(replica: Replica) -> bool:
    """Whether a pass may draw random numbers, or give sparse gradients or None. Rows of PyTorch's layers do not."""
    modules = list(replica.module.modules())
    return replica.is_stochastic or _has_sparse(modules) or not all(_is_plain(module) for module in modules)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a layer of PyTorch or a `Sequential`, without hooks."""
    own = type(module).__module__.startswith("torch.nn.modules.") and not list(module.children())
    return (own or type(module) is nn.Sequential) and not has_hooks(module)


# ---- the context of one computation


def seed_of(*parts: int) -> int:
    """A seed for the random layers of one computation, of the 32 bits that PyTorch's CPU generator uses.

    >>> seed_of(0, 1, 2) == seed_of(0, 1, 2), seed_of(0, 1, 2) == seed_of(0, 2, 1)
    (True, False)
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


class RandomState(NamedTuple):
    """The state of PyTorch's generators, of the host and of a device, from which draws go on."""

    host: Tensor
    device: Tensor | None


class Isolated:
    """Context of one computation: enables gradients, seeds PyTorch's generators, and uses one thread if `exact`.

    On exit it restores the previous settings. With `seed=None` the generators stay as they are; with a `RandomState`
    they go on from there. It is a class, since three nested `contextmanager` functions take a tenth of a small model's
    step.
    """

    __slots__ = ("_device", "_exact", "_fork", "_grad", "_on_host", "_seed", "_state", "_threads")

    def __init__(self, exact: bool, seed: int | RandomState | None, device: torch.device) -> None:
        self._exact = exact
        self._seed = seed
        self._device = device
        self._on_host = device.type in ("cpu", "meta")

    def __enter__(self) -> Isolated:
        self._threads = torch.get_num_threads() if self._exact else 1
        if self._threads != 1:
            torch.set_num_threads(1)
        self._grad = torch.is_grad_enabled()
        if not self._grad:
            torch.set_grad_enabled(True)
        if self._seed is None:
            return self
        if self._on_host:
            self._state = torch.get_rng_state()  # costs a fiftieth of fork_rng
        else:
            self._fork = torch.random.fork_rng([self._device], device_type=self._device.type)
            self._fork.__enter__()
        self._begin_draws(self._seed)
        return self

    def _begin_draws(self, seed: int | RandomState) -> None:
        if isinstance(seed, RandomState):
            torch.set_rng_state(seed.host)
            if seed.device is not None:
                torch.get_device_module(self._device).set_rng_state(seed.device, self._device)
            return
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed all devices, also others
        if not self._on_host:
            with torch.accelerator.device_index(self._device.index):
                torch.get_device_module(self._device).manual_seed(seed)

    def drawn(self) -> RandomState:
        """The state of the generators now, inside of the context."""
        device = None if self._on_host else torch.get_device_module(self._device).get_rng_state(self._device)
        return RandomState(torch.get_rng_state(), device)

    def __exit__(self, *error: Any) -> None:
        if self._seed is not None and self._on_host:
            torch.set_rng_state(self._state)
        elif self._seed is not None:
            self._fork.__exit__(*error)
        if not self._grad:
            torch.set_grad_enabled(False)
        if self._threads != 1:
            torch.set_num_threads(self._threads)
