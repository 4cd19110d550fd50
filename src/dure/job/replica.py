"""A module whose trainable parameters, and their gradients, lie in one contiguous buffer each.

    module     0.weight (32, 784)   0.bias (32,)   2.weight (10, 32)   2.bias (10,)      views of
    params    |--------------------|--------------|-------------------|------------|     one flat tensor
    grads     |--------------------|--------------|-------------------|------------|     another
               layers[0]            layers[1]      layers[2]           layers[3]         named slices

Methods, codecs and shards work on flat slices; the module works as before. A parameter that several layers share is in
the flat tensors once. A parameter with `requires_grad=False` is not in them: its value and its memory stay as they are.

A parameter becomes contiguous, so that every reader of a slice can view it in the parameter's shape. In a loop of the
user's own (`keep_strides`), it keeps its strides, as of `channels_last`: its slice is in the order of its memory.

Buffers that training changes (batch norm's running statistics) are part of a replica too. `buffers_flat` is a
snapshot of them in float64, which represents float32 and counts below 2**53 exactly: floating values first, then
integers. When replicas synchronize, floating values are averaged, and every replica takes the largest of the integers
(batch norm's `num_batches_tracked`). Boolean, complex and non-persistent buffers are constants, and so are frozen
parameters. All replicas need the same constants at the start (`constants`); training does not change them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from operator import attrgetter, is_, methodcaller
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dure.errors import ReplicaError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_WITH_DROPOUT = (nn.RNNBase, nn.MultiheadAttention)
_ALIGNED = 64
"""Marks come in multiples of this many elements, so that gradients begin at a border of cache lines."""
_ALWAYS_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameter `name` as the slice [start, stop) of the flat buffer."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Slot:
    """A parameter, the submodule and the attribute that hold it, and the views of its values and its gradient.

    `strides` are those of the views; None for contiguous ones.
    """

    layer: Layer
    strides: tuple[int, ...] | None
    owner: nn.Module
    attribute: str
    parameter: nn.Parameter
    values: Tensor
    gradient: Tensor
    home: tuple[object, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", _place(self.values))

    def view(self, flat: Tensor) -> Tensor:
        """The part of a flat tensor that belongs to the parameter, in its shape."""
        return _view(flat, self.layer, self.strides)


class _Registry:
    """The submodules, parameters and buffers that are registered in a module, compared in microseconds per layer.

    A buffer counts by its name and type: a module may assign another tensor to it in each forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._seen = self._now()

    def is_unchanged(self) -> bool:
        seen, now = self._seen, self._now()
        return len(seen[0]) == len(now[0]) and all(map(is_, seen[0], now[0])) and seen[1:] == now[1:]

    def _now(self) -> tuple[list[Any], list[str], list[type]]:
        values, modules = methodcaller("values"), self._modules
        kinds = [list(map(attrgetter(kind), modules)) for kind in ("_modules", "_parameters", "_buffers")]
        held = list(chain.from_iterable(map(values, kinds[0] + kinds[1])))
        names = list(chain.from_iterable(map(methodcaller("keys"), kinds[2])))
        return held, names, list(map(type, chain.from_iterable(map(values, kinds[2]))))


class Replica:
    """`module`, laid out flat: `params` and `grads` are 1-D, in the order of `module.named_parameters()`.

    Writing to `params` changes the module, and `loss.backward()` adds to `grads`. Calls that move parameters to other
    memory (`.to()`, `.double()`, `load_state_dict(assign=True)`) break this link, and a layer that is replaced or added
    later is not in it; `check()` detects both.

    `is_part`: it holds a part of the module's values, and other ranks hold the rest.

    Raises `ReplicaError` for a module that cannot be laid out flat.
    """

    is_part: ClassVar[bool] = False

    def __init__(self, module: nn.Module, *, keep_strides: bool = False, marked: bool = False) -> None:
        found = _apart(module)
        first = found[0][1]
        stops = list(accumulate(parameter.numel() for _, parameter in found))
        self.module = module
        self.layers = tuple(
            Layer(name, stop - parameter.numel(), stop, tuple(parameter.shape))
            for (name, parameter), stop in zip(found, stops, strict=True)
        )
        self.params = torch.empty(stops[-1], dtype=first.dtype, device=first.device)
        marks = -(-len(found) // _ALIGNED) * _ALIGNED if marked else 0
        self.marked_grads = self.params.new_zeros(marks + stops[-1])
        """`grads`, after room for a mark of each parameter if `marked`: both travel in one message."""
        self.grads = self.marked_grads[marks:]
        self._slots = tuple(
            self._adopt(layer, parameter, _strides(parameter) if keep_strides else None)
            for layer, (_, parameter) in zip(self.layers, found, strict=True)
        )
        self.keeps_gradients = True
        """Whether gradients lie in `grads`; after `drop_gradients` each lies where autograd has put it."""
        self._hidden: Sequence[Tensor] = ()
        self.figures: dict[tuple[object, ...], Any] = {}
        """Figures that have been measured of the module, by the name of the measurement."""
        self._note_registered()

    def _note_registered(self) -> None:
        """Note the parameters and buffers of the module, with which `check` compares the later ones."""
        module = self.module
        self._frozen = tuple((n, p) for n, p in module.named_parameters() if not p.requires_grad)
        self._registry = _Registry(module)
        self._known = dict(module.named_parameters())
        buffers = _persistent(module)
        self._floating = [name for name, buffer in buffers if buffer.is_floating_point()]
        self._integer = [name for name, buffer in buffers if _is_integer(buffer)]
        self._buffer_names = [name for name, _ in buffers]

    def _adopt(self, layer: Layer, parameter: nn.Parameter, strides: tuple[int, ...] | None) -> _Slot:
        values, gradient = (_view(flat, layer, strides) for flat in (self.params, self.grads))
        values.copy_(parameter.data)
        parameter.data = values
        if parameter.grad is not None:
            gradient.copy_(_dense(parameter.grad))
        parameter.grad = gradient
        path, _, attribute = layer.name.rpartition(".")
        return _Slot(layer, strides, self.module.get_submodule(path), attribute, parameter, values, gradient)

    @property
    def numel(self) -> int:
        return self.params.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.params.dtype

    @property
    def device(self) -> torch.device:
        return self.params.device

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The module's trainable parameters, in the order of `layers`."""
        return tuple(slot.parameter for slot in self._slots)

    def load(self, values: Tensor) -> None:
        """Copy the flat `values` to `params`. Raises `ReplicaError` for another shape or dtype."""
        if values.shape != self.params.shape or values.dtype != self.dtype:
            raise ReplicaError(
                f"this replica has {self.numel} parameters of {self.dtype}, "
                f"got values of shape {tuple(values.shape)} and {values.dtype}."
            )
        self.params.copy_(values)

    def move_to(self, values: Tensor) -> None:
        """Make the flat `values` the memory of the parameters, without copying; gradients keep their memory."""
        if values.data_ptr() == self.params.data_ptr():
            return
        self.params = values
        for slot in self._slots:
            slot.parameter.data = slot.view(values)
        self._slots = tuple(replace(slot, values=slot.parameter.data) for slot in self._slots)

    def drop_values(self) -> None:
        """Free the memory of parameters and gradients; shapes stay."""
        self.drop_gradients()
        self.move_to(self.params.new_zeros(()).expand(self.numel))

    def drop_gradients(self) -> None:
        """Free the memory of gradients, where something else computes them, or takes them during backward."""
        self.keeps_gradients = False
        zero = self.grads.new_zeros(())
        self.grads = self.marked_grads = zero.expand(self.numel)
        for slot in self._slots:
            slot.parameter.grad = None
        self._slots = tuple(replace(slot, gradient=zero.expand(slot.layer.shape)) for slot in self._slots)

    def take_gradients(self, indices: Sequence[int]) -> Tensor:
        """The flat gradient of the parameters `indices`, neighbors in `layers`; they have none afterwards.

        For a replica without `keeps_gradients`. A gradient that is None counts as zeros. The memory is the caller's.
        """
        slots = [self._slots[index] for index in indices]
        first = slots[0].layer.start
        if len(slots) == 1 and _lies_as(slots[0].parameter.grad, slots[0].values):
            gradient, slots[0].parameter.grad = slots[0].parameter.grad, None
            assert gradient is not None
            return gradient.detach().as_strided((slots[0].layer.numel,), (1,))  # in place: the largest are one slice
        flat = self.params.new_empty(slots[-1].layer.stop - first)
        for slot in slots:
            gradient, slot.parameter.grad = slot.parameter.grad, None
            place = _shaped(flat[slot.layer.start - first : slot.layer.stop - first], slot.layer, slot.strides)
            if gradient is None:
                place.zero_()
                continue
            place.copy_(_dense(gradient))
            if gradient.device.type != "cpu" and gradient.layout == torch.strided:
                # the gradient may belong to another stream than that of this copy
                gradient.record_stream(torch.accelerator.current_stream(gradient.device))
        return flat

    def hide_gradients(self, hidden: Sequence[Tensor]) -> None:
        """Put `hidden` in the place of the parameters' gradients until `zero_grad`."""
        self._hidden = hidden
        for slot, each in zip(self._slots, hidden, strict=True):
            slot.parameter.grad = each

    @property
    def hides_gradients(self) -> bool:
        """Whether a parameter has what `hide_gradients` gave it."""
        return any(map(self._is_hidden, range(len(self._slots))))

    def _is_hidden(self, index: int) -> bool:
        return bool(self._hidden) and self._slots[index].parameter.grad is self._hidden[index]

    @property
    def marks(self) -> Tensor:
        """The marks in front of `grads`, one for each parameter; empty if the replica has none."""
        return self.marked_grads[: len(self._slots) if self.marked_grads.numel() > self.numel else 0]

    def is_unused(self, index: int) -> bool:
        """Whether parameter `index` has no gradient, or one of zeros."""
        gradient = self._slots[index].parameter.grad
        return gradient is None or (gradient.layout == torch.strided and not bool(gradient.any()))

    @contextmanager
    def without_gradients(self, indices: Iterable[int]) -> Iterator[None]:
        """Inside, the gradients of these parameters are None."""
        parameters = [self._slots[index].parameter for index in indices]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    @contextmanager
    def stepping(self, unused: Iterable[int]) -> Iterator[None]:
        """Inside, an optimizer of the module steps by `params` and `grads`; `unused` parameters have no gradient."""
        with self.without_gradients(unused):
            yield

    def publish(self) -> None:
        """Let the module have the values of `params`: it has them already, in the same memory."""

    def collect(self) -> None:
        """Let `params` have the values of the module: it has them already, in the same memory."""

    def release(self) -> None:
        """Give each parameter memory of its own. The replica is of no use afterwards."""
        for slot in self._slots:
            slot.parameter.data = slot.parameter.data.clone()
            slot.parameter.grad = None

    def zero_grad(self) -> None:
        """Zero `grads` in place; the module's gradients stay views of it, or are None where it does not keep them."""
        if self.keeps_gradients:
            self.grads.zero_()
        if self._hidden or not self.keeps_gradients:
            for slot in self._slots:
                slot.parameter.grad = slot.gradient if self.keeps_gradients else None
        self._hidden = ()

    def kept_gradient(self) -> Tensor:
        """The flat gradient in memory that `zero_grad` leaves as it is."""
        return self.grads.clone()

    def is_emptied(self, but: int | None = None) -> bool:
        """Whether no gradient is left, as after the `zero_grad()` of a module or an optimizer.

        A backward may have written to the gradient of parameter `but`. That gradient counts where there is no other:
        it is in other memory if a `zero_grad()` has set it to None.
        """
        rest = [index for index in range(len(self._slots)) if index != but]
        if not rest:
            return self._slots[0].parameter.grad is not self._slots[0].gradient
        if any(map(self._is_hidden, rest)):
            return False
        gradients = [self._slots[index].parameter.grad for index in rest]
        return not any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    # ---- calls that detach views

    def check(self) -> None:
        """Copy gradients in other memory into `grads`, and reject parameters that left the flat buffer.

        `zero_grad()` sets gradients to None and the next `backward()` makes new tensors. Those are copied into `grads`,
        and the parameter's gradient becomes a view of `grads` again. A gradient that is None counts as zero.

        Raises `ReplicaError`. It names the call that most likely moved a parameter, or the parameter whose
        `requires_grad` has changed, or what has been added to the module or taken from it.
        """
        for slot in self._slots:
            if getattr(slot.owner, slot.attribute, None) is not slot.parameter or _place(slot.parameter) != slot.home:
                raise ReplicaError(_explain_move(slot))
        self._check_noted()
        for index in range(len(self._slots)):
            self.bring_home(index)

    def _check_noted(self) -> None:
        """Reject a module whose parameters, buffers or `requires_grad` are not those that were noted."""
        for layer, parameter in zip(self.layers, self.parameters, strict=True):
            if not parameter.requires_grad:
                raise ReplicaError(
                    f"parameter {layer.name!r} was trainable when the replica was made and is frozen now, but "
                    "momentum and weight decay would still change it. Freeze first and make the replica then: with "
                    "dure.attach, close the block, call requires_grad_(False) and attach again."
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ReplicaError(
                    f"parameter {name!r} was frozen when the replica was made and requires a gradient now, "
                    "so it would not be trained. Call requires_grad_(True) first and make the replica then: with "
                    "dure.attach, close the block, call requires_grad_(True) and attach again."
                )
        if not self._registry.is_unchanged():
            self._check_registered()

    def _check_registered(self) -> None:
        """Reject parameters and persistent buffers that are new or gone; other changes of the module are allowed.

        A layer without parameters may be replaced, and a layer may be wrapped: its parameters stay the same objects.
        """
        now = dict(self.module.named_parameters())
        buffers, known = dict.fromkeys(name for name, _ in _persistent(self.module)), set(self._buffer_names)
        before, after = ({id(each) for each in some.values()} for some in (self._known, now))
        for kind, new, gone in (
            ("parameter", _names_without(now, before), _names_without(self._known, after)),
            ("buffer", [name for name in buffers if name not in known], [n for n in known if n not in buffers]),
        ):
            if new:
                raise ReplicaError(_explain_new(kind, new[0], replaced=new[0] in gone))
            if gone:
                raise ReplicaError(
                    f"{kind} {gone[0]!r} was in the model when its replica was made and is gone. {_REMAKE}"
                )
        self._registry = _Registry(self.module)

    def bring_home(self, index: int) -> None:
        """Copy the gradient of parameter `index` into `grads` if it lies in other memory; None counts as zero."""
        slot = self._slots[index]
        gradient = slot.parameter.grad
        if gradient is slot.gradient or not self.keeps_gradients or self._is_hidden(index):
            return
        if gradient is None:
            slot.gradient.zero_()
        elif _place(gradient) != _place(slot.gradient):
            slot.gradient.copy_(_dense(gradient))
        slot.parameter.grad = slot.gradient

    # ---- buffers

    def buffers_flat(self) -> Tensor:
        """A flat float64 copy of the buffers that training may change; empty if there are none.

        It is on the replica's device; buffers, such as counters, may be on the CPU.
        """
        named, place = dict(self.module.named_buffers()), self.device
        found = [named[name].detach() for name in (*self._floating, *self._integer)]
        parts = [buffer.reshape(-1).to(place, torch.float64) for buffer in found]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device=place)

    def load_buffers(self, values: Tensor) -> None:
        """Copy a flat snapshot to the buffers; integers are rounded. Raises `ReplicaError` for another shape."""
        named = dict(self.module.named_buffers())
        targets = [named[name] for name in (*self._floating, *self._integer)]
        sizes = [target.numel() for target in targets]
        if values.shape != (sum(sizes),):
            raise ReplicaError(
                f"the buffers of this replica have {sum(sizes)} elements, got shape {tuple(values.shape)}. "
                "Load what buffers_flat() of the same model gave."
            )
        for target, part in zip(targets, torch.split(values, sizes), strict=True):
            part = part.view(target.shape)
            target.copy_(part.round() if _is_integer(target) else part)

    def merge_buffers(self, snapshots: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
        """The buffers after a synchronization: weighted means of floating values, and the largest integers."""
        stacked = torch.stack(list(snapshots))
        share = torch.ones(len(stacked), 1) if weights is None else torch.tensor(weights).unsqueeze(1)
        share = (share.to(stacked) / share.sum()).to(stacked)
        named = dict(self.module.named_buffers())
        floating = sum(named[name].numel() for name in self._floating)
        return torch.cat([(stacked[:, :floating] * share).sum(0), stacked[:, floating:].amax(0)])

    # ---- tensors that training does not change

    @property
    def constants(self) -> dict[str, Tensor]:
        """Frozen parameters, and the buffers that `buffers_flat` leaves out, by name; only dense ones, not copied."""
        trained = {*self._floating, *self._integer}
        rest = {name: buffer for name, buffer in self.module.named_buffers() if name not in trained}
        found = {**dict(self._frozen), **rest}
        return {name: tensor.detach() for name, tensor in found.items() if tensor.layout == torch.strided}

    # ---- properties of the module

    @property
    def has_batch_norm(self) -> bool:
        """Whether a sample's output depends on its batch, and training changes buffers."""
        return any(isinstance(module, _BATCH_NORMS) for module in self.module.modules())

    @property
    def is_stochastic(self) -> bool:
        """Whether a module in training mode draws random numbers, as dropout does.

        Draws in the code of a model's own `forward` are not detected.
        """
        return any(module.training and draws(module) for module in self.module.modules())


def digest(values: Tensor) -> str:
    """SHA-256 of the values' raw little-endian bytes, in hexadecimal.

    >>> digest(torch.tensor([1.0, 2.0]))[:16]
    'b9c80b5adeca4507'
    """
    array = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if sys.byteorder == "big":
        array = array.reshape(-1, values.element_size())[:, ::-1]
    return hashlib.sha256(array.tobytes()).hexdigest()


def as_bytes(tensor: Tensor) -> Tensor:
    """The values of a tensor of any type as flat bytes; a view of a contiguous tensor, else a copy.

    >>> as_bytes(torch.tensor([[True, False]]))
    tensor([1, 0], dtype=torch.uint8)
    """
    return tensor.contiguous().view(-1).view(torch.uint8)


def copy_bytes(tensor: Tensor, values: Tensor) -> None:
    """Copy `values`, the `as_bytes` of a tensor of the same shape and dtype, to `tensor`."""
    values = values.to(tensor.device)
    if not torch.equal(as_bytes(tensor), values):  # a tensor that is equal already may be read-only
        tensor.copy_(values.clone().view(tensor.dtype).view(tensor.shape))


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and trainable parameters, each parameter once. Raises `ReplicaError` for a module without one."""
    found = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    kind = type(module).__name__
    if not found:
        raise ReplicaError(f"{kind} has no trainable parameters. Give a module with some whose requires_grad is True.")
    lazy = [name for name, parameter in found if isinstance(parameter, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ReplicaError(f"parameter {lazy[0]!r} has no shape yet. Run one batch through {kind} first.")
    return found


def _apart(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """As `trainable`. Raises `ReplicaError` too if one buffer cannot hold them."""
    found = trainable(module)
    refuse_mixture(type(module).__name__, found)
    places: dict[int, str] = {}
    for name, parameter in found:
        other = places.setdefault(parameter.data_ptr(), name)
        if other != name and parameter.numel() and not parameter.is_meta:
            raise ReplicaError(
                f"parameters {other!r} and {name!r} are two objects in the same memory, which a flat buffer would "
                f"separate. Share the object instead: module.{name} = module.{other}."
            )
    return found


def _strides(parameter: nn.Parameter) -> tuple[int, ...] | None:
    """The strides of a parameter in memory of its own, without gaps; None for a contiguous one."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return None if strides == torch.empty(parameter.shape, device="meta").stride() else strides


def _view(flat: Tensor, layer: Layer, strides: tuple[int, ...] | None) -> Tensor:
    return _shaped(flat[layer.start : layer.stop], layer, strides)


def _shaped(part: Tensor, layer: Layer, strides: tuple[int, ...] | None) -> Tensor:
    return part.view(layer.shape) if strides is None else part.as_strided(layer.shape, strides)


def _lies_as(gradient: Tensor | None, values: Tensor) -> bool:
    """Whether the elements of a gradient lie in the order of `values`, without gaps."""
    return gradient is not None and gradient.layout == torch.strided and gradient.stride() == values.stride()


def refuse_mixture(kind: str, found: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `ReplicaError` for tensors of several types or devices, which one flat buffer cannot hold."""
    first_name, first = found[0]
    if not first.is_floating_point():
        raise ReplicaError(f"parameter {first_name!r} is {first.dtype}. Real floating-point parameters are supported.")
    for name, parameter in found:
        if parameter.dtype != first.dtype:
            raise ReplicaError(
                f"{kind} mixes dtypes: {first_name!r} is {first.dtype}, {name!r} is {parameter.dtype}. One dtype per "
                "replica is supported: convert the module first, as in model.float()."
            )
        if parameter.device != first.device:
            raise ReplicaError(
                f"{kind} lies on several devices: {first_name!r} on {first.device}, {name!r} on {parameter.device}. "
                f'One device per replica is supported: write model.to("{first.device}") first.'
            )


def _place(tensor: Tensor) -> tuple[object, ...]:
    """The memory of a tensor, and how it lies there."""
    layout = tensor.layout
    if layout != torch.strided:
        return (layout,)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _explain_move(slot: _Slot) -> str:
    """An error text that guesses, from the parameter's present state, which call moved it out of the flat buffer."""
    name, home = slot.layer.name, slot.values
    now = getattr(slot.owner, slot.attribute, None)
    if not isinstance(now, nn.Parameter):
        return (
            f"parameter {name!r} is no parameter of its layer any more, as after pruning, weight_norm, spectral_norm, "
            f"a parametrization, FSDP or del. {_REMAKE}"
        )
    if now.device != home.device:
        call = f'.to("{now.device}")'
        advice = f'Move the model before its replica is made; with dure.attach, attach after model.to("{now.device}").'
    elif now is not slot.parameter:
        call = f"load_state_dict(assign=True), or an assignment to module.{name},"
        advice = "Call load_state_dict(state) without assign=True, or make the replica afterwards."
    elif now.dtype != home.dtype:
        name_of_dtype = str(now.dtype).removeprefix("torch.")
        call = f".{_CONVERSIONS.get(now.dtype, f'to({now.dtype})')} made it {name_of_dtype}: the call"
        advice = f"Convert the model before its replica is made; with dure.attach, attach after model.to({now.dtype})."
    else:
        call = "an assignment to .data (as torch.nn.utils.vector_to_parameters, .to(memory_format=...) or set_() make)"
        advice = (
            "Copy values in place, for each parameter: parameter.data.copy_(values). With dure.attach over servers, "
            "which hold the model, do that before attach."
        )
    return f"parameter {name!r} is no longer in the replica's flat buffer: {call} moved it. {advice}"


_REMAKE = (
    "Change the model before its replica is made: with dure.attach, before attach; or close the block, change the "
    "model, make an optimizer of its parameters and attach again."
)


def _explain_new(kind: str, name: str, *, replaced: bool) -> str:
    what = "is another object than when the replica was made" if replaced else "was added after the replica was made"
    return f"{kind} {name!r} {what}, and would have other values at each rank. {_REMAKE}"


def _persistent(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Names and values of the buffers that are part of the module's state."""
    persistent = module.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in module.named_buffers() if name in persistent]


def _names_without(named: Mapping[str, nn.Parameter], others: Set[int]) -> list[str]:
    """Names of the parameters that are none of `others`, given by `id`."""
    return [name for name, parameter in named.items() if id(parameter) not in others]


_CONVERSIONS = {torch.float64: "double()", torch.float32: "float()", torch.float16: "half()"}


def _dense(gradient: Tensor) -> Tensor:
    return gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()


def _is_integer(buffer: Tensor) -> bool:
    return not buffer.is_floating_point() and not buffer.is_complex() and buffer.dtype != torch.bool


def draws(module: nn.Module) -> bool:
    """Whether a layer draws random numbers in training, as dropout does."""
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    if isinstance(module, _WITH_DROPOUT):
        return module.dropout > 0
    return isinstance(module, _ALWAYS_RANDOM)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, of forward or backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
