"""Optimizers: their specification as plain values, and their update rules on flat vectors.

| name       | state  | the new value of w, given g                                       | equals               |
|------------|--------|-------------------------------------------------------------------|----------------------|
| `sgd`      | (v)    | w - lr (g + weight_decay w); with `momentum`, as the next row     | `torch.optim.SGD`    |
| `momentum` | v      | v = momentum v + g; w - lr v, or w - lr (g + momentum v) if `nesterov` | `torch.optim.SGD` |
| `adagrad`  | G      | G = G + g^2; w - lr g / (sqrt(G) + eps)                           | `torch.optim.Adagrad` |
| `adam`     | m, v   | w - lr m' / (sqrt(v') + eps), m' and v' corrected for their start | `torch.optim.Adam`   |
| `adamw`    | m, v   | as `adam`, from (1 - lr weight_decay) w: decoupled weight decay   | `torch.optim.AdamW`  |
| `rmsprop`  | n, m   | w - lr g / sqrt(n - m^2 + eps); n and m, decaying means of g^2, g | optax's, centered    |
| `assign`   |        | g: a server that keeps the last value pushed to it                |                      |
| `add`      |        | w + g: a server that adds up the values pushed to it              |                      |

Weight decay is coupled: g + weight_decay w replaces g. Only `adamw` decouples it. Adagrad on a server follows Dean et
al. (2012). Their update gamma g / sqrt(G) has no `eps` and divides by zero where every gradient has been zero, so `eps`
is added to the root, as in PyTorch.

`rmsprop` is centered, with the decay `decay` of both means, and has its `eps` inside the root, as in the papers on DQN
and Ape-X. `torch.optim.RMSprop` adds it outside: for gradients below sqrt(eps), the steps of the two differ by far.

`clip` limits the norm of a gradient before the rule, as `torch.nn.utils.clip_grad_norm_` does (`Clipped`).

Every rule is element-wise: the result for a slice equals, bit for bit (float32 and float64), that slice of the result
for the whole vector. So results do not depend on how a model is cut into shards.

`docs/explanations/decisions/0007-rules-on-flat-vectors.md` compares the rules with the functional forms of
`torch.optim`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from dure.core.spec_text import MemberSpec, names, nearest, parse_members, typed, value_text
from dure.core.state import State
from dure.errors import StrategyError

BLOCK = 1 << 18
"""Elements per block of a rule that makes several passes: later passes find the block in the cache."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer as plain values. `str` gives the text form, `parse` reads it.

    The optimizer `momentum` uses a momentum of 0.9 unless another is given. A negative momentum is allowed:
    asynchronous methods may need it. `clip` is the largest norm of the gradient of the whole model; None: any.

    >>> OptimizerSpec.parse("adam:lr=0.001").betas
    (0.9, 0.999)
    >>> str(OptimizerSpec("momentum", lr=0.01, nesterov=True))
    'momentum:lr=0.01,momentum=0.9,nesterov=true'

    Raises:
        StrategyError: a value is out of its range, or `name` is unknown.
    """

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.95
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.name not in _RULES:
            raise _unknown(self.name)
        for name in ("lr", "weight_decay", "eps"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise StrategyError(f"{self.name}: {name} must be a number >= 0, got {value}.")
        if self.clip is not None and not self.clip > 0:
            raise StrategyError(f"{self.name}: clip must be a number above 0, as in clip=1, got {self.clip}.")
        if len(self.betas) != 2:
            raise StrategyError(f"{self.name}: betas must be two numbers, as in betas=0.9/0.999, got {self.betas}.")
        if self.name == "momentum" and self.momentum == 0:
            object.__setattr__(self, "momentum", 0.9)
        if not -1 < self.momentum < 1:
            raise StrategyError(f"{self.name}: momentum must be between -1 and 1, got {self.momentum}.")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise StrategyError(f"{self.name}: betas must be at least 0 and below 1, got {beta}.")
        if not 0 <= self.decay < 1:
            raise StrategyError(f"{self.name}: decay must be at least 0 and below 1, got {self.decay}.")
        if self.nesterov and self.momentum == 0:
            raise StrategyError(f"{self.name}: nesterov needs a momentum; write momentum=0.9,nesterov=true.")

    @classmethod
    def parse(cls, text: str) -> OptimizerSpec:
        """The optimizer that `text` names, as `NAME:KEY=VALUE,KEY=VALUE`; betas as `betas=0.9/0.999`."""
        call = optimizer_member(text)
        return cls(**{**typed(call, cls), "name": call.name})

    def __str__(self) -> str:
        plain = OptimizerSpec()
        parts = []
        for name in ("lr", "momentum", "nesterov", "weight_decay", "betas", "eps", "decay", "clip"):
            value = getattr(self, name)
            if name == "lr" or value != getattr(plain, name):
                parts.append(f"{name}={value_text(value)}")
        return f"{self.name}:{','.join(parts)}"


OF_GROUPS = tuple(each.name for each in fields(OptimizerSpec) if each.name not in ("name", "clip"))
"""The hyper-parameters that may differ between parameter groups. A norm is that of the whole gradient."""


def optimizer_member(text: str) -> MemberSpec:
    """Parse a user's `text` that names one optimizer and its parameters. Raises `StrategyError`."""
    call, *more = parse_members(text)
    if more:
        raise StrategyError(f'"{text}" names {1 + len(more)} optimizers; write one.')
    if call.name not in _ASKED_FOR:
        raise _unknown(call.name)
    return call


def _unknown(name: str) -> StrategyError:
    return StrategyError(f'no optimizer "{name}"; there are {names(_ASKED_FOR)}.{nearest(name, _ASKED_FOR)}')


class GroupRange(NamedTuple):
    """The range `[start, stop)` of a flat vector that belongs to a parameter group.

    `overrides` are the hyper-parameters in which the group differs; `group` is its index in a sequence of rates.
    """

    start: int
    stop: int
    overrides: Mapping[str, Any]
    group: int = 0


def restrict(segments: Sequence[GroupRange], ranges: Sequence[tuple[int, int]]) -> list[GroupRange]:
    """Translate `segments` of a whole vector to the vector that concatenates its `ranges`."""
    found = []
    offset = 0
    for start, stop in ranges:
        for segment in segments:
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                found.append(segment._replace(start=offset + low - start, stop=offset + high - start))
        offset += stop - start
    return found


def vectors_of(spec: OptimizerSpec) -> int:
    """The vectors that the rule keeps, each as long as the parameters."""
    return len(_rule(spec).keeps)


def kept_names(spec: OptimizerSpec, segments: Sequence[GroupRange]) -> list[str]:
    """The names of all vectors that the rule keeps outside or inside of `segments`.

    >>> kept_names(OptimizerSpec("sgd"), [GroupRange(0, 4, {"momentum": 0.9})])
    ['velocity']
    """
    specs = (spec, *(replace(spec, **segment.overrides) for segment in segments))
    return list(dict.fromkeys(name for each in specs for name in _rule(each).keeps))


class FlatOptimizer:
    """An update rule for a flat vector of `numel` elements, and its state.

    `segments` are slices whose hyper-parameters differ (parameter groups), as `(start, stop, overrides)`. They do not
    overlap; `overrides` may have any field in `OF_GROUPS`. Outside of them `spec` applies. It has the vectors named
    `keeps` too: a part of a model has those of the whole, whichever groups it holds.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        numel: int,
        dtype: torch.dtype = torch.float32,
        *,
        segments: Sequence[GroupRange | tuple[int, int, Mapping[str, Any]]] = (),
        device: torch.device | str = "cpu",
        keeps: Sequence[str] = (),
    ) -> None:
        self.spec = spec
        self.numel = numel
        self.steps = 0
        self._pieces = _pieces(spec, numel, [GroupRange(*segment) for segment in segments])
        kept = [name for piece in self._pieces for name in _rule(piece[2]).keeps]
        self.vectors = {name: torch.zeros(numel, dtype=dtype, device=device) for name in dict.fromkeys([*keeps, *kept])}
        self._scratch = torch.empty(2, min(BLOCK, numel), dtype=dtype, device=device).unbind()

    def apply(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
        *,
        lr: float | Sequence[float] | None = None,
    ) -> None:
        """Make one step from `values` along `gradient`, and write the new values to `out`, which may be `values`.

        `lr` replaces the rates of `spec` and `segments`: one rate for all, or one per group of the segments.
        """
        self.steps += 1
        for start, stop, spec, group in self._pieces:
            rate = _rate(spec, lr, group)
            rule = _rule(spec)
            if rule is _RULES["sgd"] and not spec.weight_decay and stop - start == values.numel():
                torch.add(values, gradient, alpha=-rate, out=out)  # the most frequent case, in one call
                continue
            size = stop - start if rule is _RULES["sgd"] and not spec.weight_decay else BLOCK
            for low in range(start, stop, max(size, 1)):
                high = min(low + size, stop)
                rule.update(self._view(spec, rate, slice(low, high), values, gradient, out))

    def increment(
        self, values: torch.Tensor, gradient: torch.Tensor, lr: float | Sequence[float] | None = None
    ) -> torch.Tensor:
        """Make one step and return the new values minus `values`, for memory that several workers write to at once."""
        gradient = gradient.clone()
        for start, stop, spec, _ in self._pieces:
            if spec.weight_decay and spec.name != "adamw":
                gradient[start:stop].add_(values[start:stop], alpha=spec.weight_decay)
        step = torch.zeros_like(gradient)
        self.apply(step, gradient, step, lr=lr)
        for start, stop, spec, group in self._pieces:
            if spec.name == "adamw":
                step[start:stop].add_(values[start:stop], alpha=-_rate(spec, lr, group) * spec.weight_decay)
        return step

    def ahead(
        self,
        values: torch.Tensor,
        steps: Callable[[float], float],
        out: torch.Tensor,
        *,
        lr: float | Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Write to `out` the `values` that the present velocity reaches in `steps`, a function of the momentum.

        The rule must be momentum: w - steps lr v. Weight decay and Nesterov's correction are left out.
        """
        velocity = self.vectors["velocity"]
        for start, stop, spec, group in self._pieces:
            cut, reach = slice(start, stop), _rate(spec, lr, group) * steps(spec.momentum)
            torch.add(values[cut], velocity[cut], alpha=-reach, out=out[cut])
        return out

    def _view(
        self,
        spec: OptimizerSpec,
        lr: float,
        cut: slice,
        values: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
    ) -> _View:
        if cut.start or cut.stop < self.numel:  # a slice takes as long as the arithmetic of a thousand elements
            values, gradient, out = values[cut], gradient[cut], out[cut]
        return self._over(spec, lr, cut, values, gradient, out)

    def _over(
        self,
        spec: OptimizerSpec,
        lr: float,
        cut: slice,
        values: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
    ) -> _View:
        """The arguments of the rule for the elements `cut` of its state."""
        kept = [self.vectors[name] for name in _rule(spec).keeps]
        decayed, scratch = self._scratch
        if cut.start or cut.stop < self.numel:
            kept = [vector[cut] for vector in kept]
            decayed, scratch = decayed[: cut.stop - cut.start], scratch[: cut.stop - cut.start]
        if spec.weight_decay and spec.name != "adamw":
            gradient = torch.add(gradient, values, alpha=spec.weight_decay, out=decayed)
        return _View(spec, lr, self.steps, values, gradient, out, scratch, kept)

    def state(self) -> State:
        """The state that a checkpoint keeps: the optimizer's vectors (not copies) and the number of its steps."""
        return State(dict(self.vectors), {"steps": self.steps})

    def restore(self, state: State) -> None:
        """Continue from `state`. Raises `ValueError` if it belongs to another rule or size."""
        tensors = state.tensors
        if tensors.keys() != self.vectors.keys():
            given, wanted = names(sorted(tensors)) or "nothing", names(sorted(self.vectors)) or "nothing"
            raise ValueError(f"{self.spec} keeps {wanted}, and the state given has {given}: it is another optimizer's.")
        for name, vector in self.vectors.items():
            if tensors[name].shape != vector.shape:
                raise ValueError(f"{name} has {tensors[name].numel()} elements, and the optimizer {self.numel}.")
            vector.copy_(tensors[name])
        self.steps = int(state.plain["steps"])


def _rate(spec: OptimizerSpec, lr: float | Sequence[float] | None, group: int) -> float:
    if lr is None:
        return spec.lr
    return lr if isinstance(lr, (int, float)) else lr[group]


def has_velocity(spec: OptimizerSpec) -> bool:
    """Whether the rule is momentum, whose state is a velocity."""
    return _rule(spec).keeps == ("velocity",)


def leaves_alone(spec: OptimizerSpec) -> bool:
    """Whether a zero gradient changes neither values nor the rule's state, so that its step can be left out."""
    return spec.name in ("sgd", "adagrad") and not (spec.momentum or spec.weight_decay)


class Clipped:
    """A rule whose gradients are the whole model's, with their norm limited to `clip`."""

    def __init__(self, optimizer: FlatOptimizer, clip: float) -> None:
        self.optimizer = optimizer
        self.spec = optimizer.spec
        self._clip = clip

    def apply(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
        *,
        lr: float | Sequence[float] | None = None,
    ) -> None:
        """As `FlatOptimizer.apply`; `gradient` keeps its values."""
        factor = clip_factor(float(torch.linalg.vector_norm(gradient)), self._clip)
        self.optimizer.apply(values, gradient if factor == 1 else gradient * factor, out, lr=lr)

    def state(self) -> State:
        return self.optimizer.state()

    def restore(self, state: State) -> None:
        self.optimizer.restore(state)


def clip_factor(norm: float, clip: float) -> float:
    """The factor on a gradient with this norm, so that the norm becomes `clip` at most: that of PyTorch.

    >>> clip_factor(0.5, 1.0), round(clip_factor(4.0, 1.0), 5)
    (1.0, 0.25)
    """
    factor = clip / (norm + 1e-6)
    return factor if not factor >= 1 else 1.0  # NaN stays


class RangesOptimizer(FlatOptimizer):
    """An update rule for some `ranges` of a flat vector; a gradient is the concatenation of these ranges.

    `segments` are the parameter groups of the whole vector. The vectors of its state are as long as a gradient, and
    have the same names for all ranges, also for ranges of a group that keeps nothing, or without elements.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        ranges: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        *,
        segments: Sequence[GroupRange] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        stops = list(accumulate(stop - start for start, stop in ranges))
        own = restrict(segments, ranges)
        numel, names = stops[-1] if stops else 0, kept_names(spec, segments)
        super().__init__(spec, numel, dtype, segments=own, device=device, keeps=names)
        held = [(at - (stop - start), at, start) for at, (start, stop) in zip(stops, ranges, strict=True)]
        self._pieces = [
            (max(start, low), min(stop, high), spec, group)
            for start, stop, spec, group in self._pieces
            for low, high, _ in held
            if max(start, low) < min(stop, high)
        ]
        self._starts = [low for low, _, _ in held]
        self._shifts = [first - low for low, _, first in held]

    def _view(
        self,
        spec: OptimizerSpec,
        lr: float,
        cut: slice,
        values: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
    ) -> _View:
        shift = self._shifts[bisect_right(self._starts, cut.start) - 1]
        there = slice(cut.start + shift, cut.stop + shift)
        return self._over(spec, lr, cut, values[there], gradient[cut], out[there])


class RowOptimizer:
    """An update rule for a `table` of which each step changes some rows. `leaves_alone` must hold for the rule.

    The result equals, bit for bit, a step of the whole table in which the gradient of all other rows is zero. `group`
    is the table's index in a sequence of rates.
    """

    def __init__(self, spec: OptimizerSpec, table: torch.Tensor, group: int = 0) -> None:
        self.spec = spec
        self.group = group
        self.vectors = {name: torch.zeros_like(table) for name in _rule(spec).keeps}

    def apply(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        gradient: torch.Tensor,
        lr: float | Sequence[float] | None = None,
    ) -> None:
        """One step of `rows` (count) of `table` (rows, width), in place, given their `gradient` (count, width)."""
        some = FlatOptimizer(self.spec, gradient.numel(), gradient.dtype, device=gradient.device)
        for name, vector in self.vectors.items():
            some.vectors[name] = vector[rows].reshape(-1)
        values = table[rows].reshape(-1)
        some.apply(values, gradient.reshape(-1), values, lr=_rate(self.spec, lr, self.group))
        table[rows] = values.view_as(gradient)
        for name, vector in self.vectors.items():
            vector[rows] = some.vectors[name].view_as(gradient)


# ---- update rules, each in PyTorch's order of operations


class _View(NamedTuple):
    """The arguments of a rule: the same slice of each vector. `kept` are the vectors of the rule's state."""

    spec: OptimizerSpec
    lr: float
    step: int
    values: torch.Tensor
    gradient: torch.Tensor
    out: torch.Tensor
    scratch: torch.Tensor
    kept: Sequence[torch.Tensor]


def _assign(view: _View) -> None:
    view.out.copy_(view.gradient)


def _add(view: _View) -> None:
    torch.add(view.values, view.gradient, out=view.out)


def _sgd(view: _View) -> None:
    torch.add(view.values, view.gradient, alpha=-view.lr, out=view.out)


def _momentum(view: _View) -> None:
    (velocity,) = view.kept
    direction = velocity.mul_(view.spec.momentum).add_(view.gradient)
    if view.spec.nesterov:
        direction = torch.add(view.gradient, velocity, alpha=view.spec.momentum, out=view.scratch)
    torch.add(view.values, direction, alpha=-view.lr, out=view.out)


def _adagrad(view: _View) -> None:
    (squares,) = view.kept
    squares.addcmul_(view.gradient, view.gradient)
    root = torch.sqrt(squares, out=view.scratch).add_(view.spec.eps)
    torch.addcdiv(view.values, view.gradient, root, value=-view.lr, out=view.out)


def _adam(view: _View) -> None:
    mean, squares = view.kept
    first, second = view.spec.betas
    mean.lerp_(view.gradient, 1 - first)
    squares.mul_(second).addcmul_(view.gradient, view.gradient, value=1 - second)
    root = torch.sqrt(squares, out=view.scratch).div_((1 - second**view.step) ** 0.5).add_(view.spec.eps)
    torch.addcdiv(view.values, mean, root, value=-view.lr / (1 - first**view.step), out=view.out)


def _adamw(view: _View) -> None:
    decayed = torch.mul(view.values, 1 - view.lr * view.spec.weight_decay, out=view.out)
    _adam(view._replace(values=decayed))


def _rmsprop(view: _View) -> None:
    squares, mean = view.kept
    squares.mul_(view.spec.decay).addcmul_(view.gradient, view.gradient, value=1 - view.spec.decay)
    mean.lerp_(view.gradient, 1 - view.spec.decay)
    variance = torch.addcmul(squares, mean, mean, value=-1, out=view.scratch).clamp_(min=0)  # rounding may be below
    torch.addcdiv(view.values, view.gradient, variance.add_(view.spec.eps).sqrt_(), value=-view.lr, out=view.out)


class _Rule(NamedTuple):
    update: Callable[[_View], None]
    keeps: tuple[str, ...]


_RULES: Mapping[str, _Rule] = {
    "sgd": _Rule(_sgd, ()),
    "momentum": _Rule(_momentum, ("velocity",)),
    "adagrad": _Rule(_adagrad, ("squares",)),
    "adam": _Rule(_adam, ("mean", "squares")),
    "adamw": _Rule(_adamw, ("mean", "squares")),
    "rmsprop": _Rule(_rmsprop, ("squares", "mean")),
    "assign": _Rule(_assign, ()),
    "add": _Rule(_add, ()),
}


class TorchForm(NamedTuple):
    """The optimizer of PyTorch that equals a rule bit for bit.

    `shared` are the hyper-parameters of both, by the same name, beside the rate. `off` are the options of PyTorch's
    alone, which must be off.
    """

    kind: type[torch.optim.Optimizer]
    shared: tuple[str, ...]
    off: tuple[str, ...]


_OF_SGD = TorchForm(torch.optim.SGD, ("momentum", "nesterov", "weight_decay"), ("dampening", "maximize"))
_OF_ADAM = ("betas", "eps", "weight_decay")

TORCH_FORMS: Mapping[str, TorchForm] = {
    "sgd": _OF_SGD,
    "momentum": _OF_SGD,
    "adagrad": TorchForm(
        torch.optim.Adagrad, ("eps", "weight_decay"), ("lr_decay", "initial_accumulator_value", "maximize")
    ),
    "adam": TorchForm(torch.optim.Adam, _OF_ADAM, ("amsgrad", "maximize", "decoupled_weight_decay")),
    "adamw": TorchForm(torch.optim.AdamW, _OF_ADAM, ("amsgrad", "maximize")),
}
"""The form of each rule that PyTorch has. `rmsprop` has none: PyTorch adds `eps` outside of the root."""


_ASKED_FOR = [name for name in _RULES if name not in ("assign", "add")]
"""Optimizers that a user may name. The others serve methods whose pushes are not gradients."""


def _rule(spec: OptimizerSpec) -> _Rule:
    return _RULES["momentum" if spec.name == "sgd" and spec.momentum else spec.name]


def _pieces(
    spec: OptimizerSpec, numel: int, segments: Sequence[GroupRange]
) -> list[tuple[int, int, OptimizerSpec, int]]:
    """Cut the whole vector into slices with one set of hyper-parameters each: (start, stop, spec, group)."""
    pieces = []
    at = 0
    for start, stop, overrides, group in sorted(segments, key=lambda segment: segment[:2]):
        if not at <= start <= stop <= numel:
            raise ValueError(f"segment [{start}, {stop}) overlaps another or leaves a vector of {numel} elements.")
        unknown = set(overrides) - set(OF_GROUPS)
        if unknown:
            raise ValueError(f"segment [{start}, {stop}) sets {names(sorted(unknown))}, no hyper-parameter of a slice.")
        pieces += [(at, start, spec, 0), (start, stop, replace(spec, **overrides), group)]
        at = stop
    pieces.append((at, numel, spec, 0))
    return [piece for piece in pieces if piece[0] < piece[1]]
