"""The user's optimizer: its steps at this rank, or its rule where servers step in its place.

At this rank every optimizer is possible that steps without a closure. A shard, of a server or of a rank, holds a slice
of the model, so only element-wise rules can run on it (`FlatRule`), and of those the ones that `TORCH_FORMS` of
`dure.job.optimizer` lists, with the options that must be off. Each parameter group is a segment of the flat parameters
with hyper-parameters of its own; its rate counts at every step. The shards hold the state of the rule, momentum and
moments: it is neither saved nor loaded with the user's optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch

from dure.core.state import State
from dure.errors import UsageError
from dure.job.optimizer import TORCH_FORMS, GroupRange, OptimizerSpec, TorchForm
from dure.user_loop.checks import MissingGradient, WrapperGuard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.amp import GradScaler
    from torch.utils.hooks import RemovableHandle

    from dure.job.replica import Replica


class RulePlace(NamedTuple):
    """The words of errors for a place where a `FlatRule` steps: its holders, and the remedies."""

    runs: str
    holders: str
    saved: str
    otherwise: str


_LISTED = "SGD, SGD with momentum or nesterov, Adagrad, Adam and AdamW run on"
AT_SERVERS = RulePlace(
    f"{_LISTED} servers",
    "servers",
    "load the model's state alone",
    'Or use a method whose steps are local: sync="bsp" over collectives, or sync="averaging".',
)
AT_SHARDS = RulePlace(
    f"{_LISTED} the shards of ranks",
    "the shards of the ranks",
    "load what replica.state_dict() gave at each rank",
    "Or leave shard out: then each rank has the whole state, and every optimizer runs.",
)


class UserOptimizer:
    """A `LocalOptimizer`: the step that the user's optimizer takes on the replica's module.

    Only `apply` may make it step: a call of `optimizer.step()` from outside would move one replica and no other, and
    is refused. `number` tells it from the others that are attached now. `unused` are the numbers of the parameters
    without a gradient in this step: the optimizer sees None there, as in plain PyTorch.
    """

    spec = OptimizerSpec()

    def __init__(self, optimizer: torch.optim.Optimizer, replica: Replica) -> None:
        _check_owner(optimizer, replica)
        self.optimizer = optimizer
        self.pausing = False
        self._stepped = False
        self._replica = replica
        self._mine = False
        self.missing = MissingGradient(replica, optimizer)
        self.unused: Sequence[int] = ()
        self.number: int = 1 + max((other.number for other in _ATTACHED), default=0)
        self._members = _members(optimizer)
        self._hooks: list[RemovableHandle | WrapperGuard] = [
            optimizer.register_step_pre_hook(self._guard),
            WrapperGuard(replica),
        ]
        _ATTACHED.add(self)

    def apply(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
        *,
        lr: float | Sequence[float] | None = None,
    ) -> None:
        replica = self._replica
        self._stepped = True
        if self.pausing:
            return
        if values is not replica.params:
            replica.load(values)
        if gradient is not replica.grads:
            replica.grads.copy_(gradient)
        unused = [index for index in self.unused if replica.is_unused(index)]
        with self._stepping(), replica.stepping(unused):
            self.optimizer.step()
        if out is not replica.params:
            out.copy_(replica.params)

    def holds(self, parameters: Set[int]) -> bool:
        """Whether it trains one of these, given by `id`."""
        return any(id(parameter) in parameters for parameter in self._replica.parameters)

    def check(self) -> None:
        """Raises `UsageError` if a parameter that is none of the model's has been added to the optimizer."""
        members, now = self._members, _members(self.optimizer)
        if len(members) != len(now) or not all(map(is_, members, now)):
            _check_owner(self.optimizer, self._replica)
            self._members = now

    def begin_step(self, unused: Sequence[int], *, pausing: bool) -> None:
        """A step of the user's loop begins; while `pausing`, nothing changes in it."""
        self.unused = unused
        self.pausing = pausing
        self._stepped = False

    def end_step(self) -> None:
        """If shards stepped in place of this optimizer, let schedulers see a step of it that changes nothing."""
        if not self._stepped:
            self._step_without_gradients()
        self.missing.reset()

    def _step_without_gradients(self) -> None:
        with self._stepping(), self._replica.without_gradients(range(len(self._replica.layers))):
            self.optimizer.step()

    def state(self) -> State:
        """An empty state: the user saves `optimizer.state_dict()`."""
        return State()

    def restore(self, state: State) -> None:
        """Do nothing: the user loads the state of the optimizer."""

    def refuse_states(self, place: RulePlace) -> None:
        """Refuse to load a state, apart from hyper-parameters, from now on: shards step, and would not use it."""
        self._hooks.append(self.optimizer.register_load_state_dict_pre_hook(partial(_refuse_state, place)))

    def close(self) -> None:
        """Permit the user's own calls of `step` again, and another attachment of the model."""
        for hook in self._hooks:
            hook.remove()
        self.missing.close()
        _ATTACHED.discard(self)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._mine = True
        try:
            yield
        finally:
            self._mine = False

    def _guard(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._mine:
            raise UsageError(
                "optimizer.step() was called while its model is attached, which would move this replica alone. Write "
                "replica.step() in its place, or replica.step(scaler) in place of scaler.step(optimizer)."
            )


class RoutedOptimizer(torch.optim.Optimizer):
    """An optimizer for loops that step by themselves: its `step` is that of an attached model, `take`.

    It shares the parameter groups and the state of `inner`, the user's optimizer. A gradient scaler hands itself over
    and lets `take` decide on an overflow, so that all ranks skip the same steps.
    """

    def __init__(self, inner: torch.optim.Optimizer, take: Callable[..., bool], zero: Callable[[], None]) -> None:
        # No call of the base class: it would make parameter groups of its own.
        self.inner = inner
        self._take = take
        self._zero = zero
        self._step_supports_amp_scaling = True
        # The scaler announces another protocol, by which an optimizer cannot lower the scale of this rank.
        warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: GradScaler | None = None) -> Any:
        """Step with the gradients that `backward()` left, and zero them; returns the loss that `closure` computes."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take(grad_scaler, self)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients; they keep their memory."""
        self._zero()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "replica.routed_optimizer steps at the connections of this rank, so no copy of it can be made, and "
            "it cannot be pickled. Copy replica.optimizer, or save its state_dict()."
        )


_ATTACHED: WeakSet[UserOptimizer] = WeakSet()
"""The optimizers of all attached models. A module does not show that it is attached, and admits one method only."""


def check_free(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises `UsageError` where `model`, a part of it, or `optimizer` is attached."""
    wanted = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for other in _ATTACHED:
        taken = "optimizer" if other.optimizer is optimizer else "model"
        if taken == "optimizer" or other.holds(wanted):
            raise UsageError(
                f"this {taken} is attached already, and can train by one method at a time. Close that first: leave its "
                "`with` block, or call replica.close()."
            )


_TRANSPARENT = {
    ("accelerate", "AcceleratedOptimizer"),
    ("lightning", "LightningOptimizer"),
    ("pytorch_lightning", "LightningOptimizer"),
    ("lightning", "_FabricOptimizer"),
}
"""Packages and classes of wrappers that pass every step to their `optimizer`."""
_SYNCHRONIZING = {("torch", "ZeroRedundancyOptimizer"), ("torch", "PostLocalSGDOptimizer")}


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the wrappers of Accelerate and Lightning.

    Raises `UsageError` for an object that is no optimizer of PyTorch, or that synchronizes the ranks itself.
    """
    while _names(optimizer) & _TRANSPARENT:
        optimizer = optimizer.optimizer
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"dure.attach needs an optimizer of torch.optim, and got an object of type {kind}. Write "
            "dure.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)); if the object wraps such an optimizer, "
            "give the optimizer inside."
        )
    if _names(optimizer) & _SYNCHRONIZING:
        raise UsageError(
            f"{kind} synchronizes the ranks as well: both would do so. Attach with the optimizer that it is made of, "
            "such as torch.optim.AdamW(model.parameters(), lr=0.001). To shard its state over the ranks, write "
            'dure.attach(model, optimizer, sync="bsp", shard="zero:stage=1").'
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UsageError(
            f"{kind} has no hooks for steps, because its constructor does not call torch.optim.Optimizer.__init__. "
            "Call super().__init__(params, defaults) there; if it wraps another optimizer, give the optimizer inside."
        )
    return optimizer


def _names(value: object) -> set[tuple[str, str]]:
    return {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__}


class FlatRule:
    """The user's optimizer as shards of the flat model are to apply it, at a `place`. Raises `UsageError` if none can.

    `spec` is the rule, `segments` its hyper-parameters by parameter group, `rates()` the present rate of each group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, replica: Replica, place: RulePlace = AT_SERVERS) -> None:
        self._optimizer = optimizer  # whose groups are others after a load_state_dict()
        self._place = place
        name, self._form = _form_of(optimizer, place)
        _check_options(optimizer, self._form, place)
        self._fixed = [self._hyper_parameters(group) for group in optimizer.param_groups]
        self.spec = OptimizerSpec(name, **self._fixed[0])
        self.segments = self._segments(replica)

    def rates(self) -> list[float]:
        """The rate of each group, and zero for parameters of none. Raises `UsageError` if something else changed."""
        groups, before = self._optimizer.param_groups, len(self._fixed)
        if len(groups) != before:
            raise UsageError(
                f"the optimizer has {len(groups)} parameter groups, and had {before} when it was attached: "
                f"{self._place.holders} have those. Add groups first, then attach."
            )
        for number, (group, fixed) in enumerate(zip(groups, self._fixed, strict=True)):
            now = self._hyper_parameters(group)
            changed = [name for name in now if name != "lr" and now[name] != fixed[name]]
            if changed:
                name = changed[0]
                raise UsageError(
                    f"{name} of parameter group {number} went from {fixed[name]} to {now[name]}. On "
                    f"{self._place.holders} only the rate may change while training; a OneCycleLR needs "
                    "cycle_momentum=False."
                )
        return [*(float(group["lr"]) for group in groups), 0.0]

    def _hyper_parameters(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {**{name: group[name] for name in self._form.shared}, "lr": float(group["lr"])}

    def _segments(self, replica: Replica) -> list[GroupRange]:
        """Neighboring layers of one group are one segment."""
        groups = self._optimizer.param_groups
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        segments: list[GroupRange] = []
        for layer, parameter in zip(replica.layers, replica.parameters, strict=True):
            number = group_of.get(id(parameter), len(groups))
            fixed = self._fixed[number] if number < len(groups) else {"lr": 0.0}
            if segments and segments[-1].group == number:
                segments[-1] = segments[-1]._replace(stop=layer.stop)
            else:
                segments.append(GroupRange(layer.start, layer.stop, fixed, number))
        return segments


def _form_of(optimizer: torch.optim.Optimizer, place: RulePlace) -> tuple[str, TorchForm]:
    """The rule that equals the optimizer, by its name in `dure.job.optimizer`, and the form of that rule."""
    for name, form in TORCH_FORMS.items():
        if type(optimizer) is form.kind:
            return name, form
    raise UsageError(f"{place.runs}, element by element; {type(optimizer).__name__} does not. {place.otherwise}")


def _check_options(optimizer: torch.optim.Optimizer, form: TorchForm, place: RulePlace) -> None:
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        for name in form.off:
            if group.get(name):
                raise UsageError(f"{place.runs}, but not {kind} with {name}={group[name]}. {place.otherwise}")
    if any(map(_has_stepped, optimizer.state.values())):
        raise UsageError(
            f"this {kind} has taken steps, and {place.holders} would start without its state. Attach with a fresh "
            f"optimizer. {place.otherwise}"
        )


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether the state of a parameter is more than what some optimizers set up beforehand."""
    return float(state["step"]) > 0 if "step" in state else any(value is not None for value in state.values())


def _refuse_state(place: RulePlace, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    if any(map(_has_stepped, loaded["state"].values())):
        raise UsageError(
            f"this state holds what {type(optimizer).__name__} has gathered, and {place.holders}, which step in its "
            f"place, keep their own, which began with nothing: {place.saved}. {place.otherwise}"
        )


def _members(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raises `UsageError` for an optimizer that cannot step once with the dense gradient of a step."""
    kind = type(optimizer).__name__
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{kind} computes the loss itself, by the closure that its step() needs, several times in a step; an "
            "attached model has one gradient for each step. Take one that steps without a closure, or for L-BFGS "
            'dure.train(job, sync="lbfgs").'
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            f"{kind} needs sparse gradients, and the gradients of an attached model are parts of one dense tensor. "
            "Take Adam; a layer with sparse=True may stay."
        )
    for number, group in enumerate(optimizer.param_groups):
        _check_flags(kind, number, group)


def _check_flags(kind: str, number: int, group: Mapping[str, Any]) -> None:
    """Raises `UsageError` for flags of a parameter group with which no step of a trainable parameter succeeds."""
    if group.get("differentiable"):
        raise UsageError(
            f"parameter group {number} of {kind} has differentiable=True, which PyTorch cannot step with: trained "
            "parameters are leaves that require a gradient. Leave it out."
        )
    if group.get("capturable") and any(parameter.device.type == "cpu" for parameter in group["params"]):
        raise UsageError(
            f"parameter group {number} of {kind} has capturable=True and a parameter on the CPU: that flag is for "
            "graphs of an accelerator. Leave it out, or move the model to the accelerator first."
        )


def _check_owner(optimizer: torch.optim.Optimizer, replica: Replica) -> None:
    mine = {id(parameter) for parameter in replica.module.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        strange = [each for each in group["params"] if id(each) not in mine]
        if strange:
            place, home = strange[0].device, next(replica.module.parameters()).device
            other = f" It is on {place}, and the model is on {home}: make the optimizer after model.to(...)."
            raise UsageError(
                f"parameter group {number} of the optimizer has a parameter of shape {tuple(strange[0].shape)} that is "
                "none of the model's. Attach the module that holds all that is trained, with an optimizer of its "
                f"parameters.{other if place != home else ''}"
            )
