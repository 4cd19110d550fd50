"""Stacked gradients: several gradients of equal shapes at once, in one of two ways, and the check of a way.

| way       | models                                              | gradients                                   |
|-----------|-----------------------------------------------------|---------------------------------------------|
| `Dense`   | dense layers and element-wise activations in a chain | batched products, written by hand           |
| `Vmapped` | others                                              | `torch.func.vmap` over stacked parameters   |

Rows of stacked tensors start at multiples of 64 bytes. Kernels treat unaligned edges differently, and so treat every
row of a stack alike. `find_fault` checks it: the bits of a gradient must not depend on the other works of its stack.

`Dense` writes the three products of a layer's backward pass by hand instead of by autograd, for three reasons. The
gradient of a weight is written to its slice of the flat result; autograd would transpose it and copy it twice. No
gradient by the inputs of the model is computed. Large weights are read in place, since copying them into a stack would
double the memory traffic that bounds their products.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dure.core.user_code import explain_user_errors
from dure.errors import DureError
from dure.job.data.dataset import Batch, arguments, joined, keywords, mapped, tensors

if TYPE_CHECKING:
    from dure.job.gradient import Gradient, GradientWork
    from dure.job.replica import Layer, Replica


Loss = Callable[[Any, Any], Tensor]


class Stacked(Protocol):
    """A way to compute several gradients of equal shapes at once."""

    describe: str
    least: int
    """Least number of pending gradients for which the engine uses it."""
    fewest: int
    """Fewest gradients in one stack, where the engine divides more than the most into several stacks."""

    def evaluate(self, works: Sequence[GradientWork]) -> tuple[Tensor, Tensor]:
        """Compute flat gradients, one per row of a new tensor, and the losses; the host does not wait for them."""
        ...


class StackMemory:
    """Memory for a stack of tensors of one shape, kept between uses, since new pages cost more than the copy."""

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        self.shape = torch.Size(shape)
        self._memory = like.new_empty(0)

    def stack(self, tensors: list[Tensor]) -> Tensor:
        """Copy `tensors` into a stack (len(tensors), *shape), valid until the next call."""
        if len(self._memory) < len(tensors):
            self._memory = aligned_rows(len(tensors), self.shape.numel(), self._memory)
        room = self._memory[: len(tensors), : self.shape.numel()].view(-1, *self.shape)
        return torch.stack(tensors, out=room)


def aligned_rows(count: int, numel: int, like: Tensor) -> Tensor:
    """New memory for `count` rows of at least `numel` elements, each row at a multiple of 64 bytes."""
    return like.new_empty(count, numel + -numel % 16)


def part_of(rows: Tensor, layer: Layer) -> Tensor:
    """A view of one parameter in every row: (rows, *its shape)."""
    return rows[:, layer.start : layer.stop].view(-1, *layer.shape)


def present(batch: Batch | None) -> Batch:
    """The batch of a work, which has one except in timing-only runs."""
    assert batch is not None
    return batch


def _places(replica: Replica) -> dict[str, str]:
    """Every place of a parameter in the module, with the name of its layer; each place once.

    `functional_call` with `tie_weights` sets a module that has two names twice, and so never sets it back.
    """
    names = {id(each): layer.name for each, layer in zip(replica.parameters, replica.layers, strict=True)}
    return {
        f"{path}.{name}" if path else name: names[id(each)]
        for path, part in replica.module.named_modules()
        for name, each in part._parameters.items()
        if id(each) in names
    }


class Vmapped:
    """Computes stacked gradients by `torch.func.vmap` over stacked parameters, if at least `least` are pending."""

    def __init__(self, replica: Replica, loss: Loss, least: int) -> None:
        self.least = least
        self.fewest = least // 2
        self.describe = f"vmap, where at least {least} are pending"
        self._layers = replica.layers
        self._values = StackMemory([replica.numel], replica.params)
        module, places = replica.module, _places(replica)

        def loss_at(parameters: Mapping[str, Tensor], inputs: Batch, targets: Batch) -> Tensor:
            placed = {place: parameters[name] for place, name in places.items()}
            outputs = torch.func.functional_call(module, placed, arguments(inputs), keywords(inputs), tie_weights=False)
            return loss(outputs, targets)

        self._gradients = torch.func.vmap(torch.func.grad_and_value(loss_at), randomness="error")

    def evaluate(self, works: Sequence[GradientWork]) -> tuple[Tensor, Tensor]:
        values = self._values.stack([work.values for work in works])
        inputs = joined(torch.stack, [present(work.inputs) for work in works])
        targets = joined(torch.stack, [present(work.targets) for work in works])
        parameters = {layer.name: part_of(values, layer) for layer in self._layers}
        gradients, losses = self._gradients(parameters, inputs, targets)
        result = aligned_rows(len(values), values.shape[1], values)[:, : values.shape[1]]
        for layer in self._layers:
            part_of(result, layer).copy_(gradients[layer.name])
        return result, losses


# ---- dense layers in a chain

_ALIGNMENT = 64
"""Multiple of elements to which rows are padded for element-wise functions: the most that a vector loop takes."""

LARGE = 65_536
"""Bytes from which copying a weight into a stack costs more than the calls that it saves."""

_ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish,
    nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Linear:
    """A dense layer: the ranges of its weight (outputs, inputs) and bias in the flat parameters.

    The products with a `large` weight are computed for each work alone, on the lent values, without a stack.
    """

    weight: Layer
    bias: Layer | None
    large: bool


@dataclass(frozen=True, slots=True)
class _Batch:
    """One evaluation: its works, their stacked small parameters by name, and the rows of the result."""

    works: Sequence[GradientWork]
    small: Mapping[str, Tensor]
    result: Tensor


class Dense:
    """Gradients of dense layers with element-wise activations between them."""

    least = 1
    fewest = 1

    def __init__(self, replica: Replica, loss: Loss, steps: Sequence[_Linear | nn.Module], padded_to: int) -> None:
        self.describe = "batched products" if padded_to == 1 else f"batched products padded to {padded_to} rows"
        self._padded_to = padded_to
        self._numel = replica.numel
        self._steps = steps
        self._first = next(index for index, step in enumerate(steps) if isinstance(step, _Linear))
        self._loss = loss
        large = {step.weight.name for step in steps if isinstance(step, _Linear) and step.large}
        self._small = [
            (run, StackMemory([run[-1].stop - run[0].start], replica.params)) for run in _runs(replica, large)
        ]
        self._inputs: StackMemory | None = None

    @classmethod
    def of(cls, replica: Replica, loss: Loss, work: GradientWork, padded_to: int) -> Dense | None:
        """A way that pads stacks to at least `padded_to` rows; None if the model or its inputs are no dense chain."""
        steps = _read_chain(replica, work)
        return None if not steps else cls(replica, loss, steps, padded_to)

    def evaluate(self, works: Sequence[GradientWork]) -> tuple[Tensor, Tensor]:
        padded = [*works, *[works[-1]] * (self._padded_to - len(works))]
        targets = joined(torch.stack, [present(work.targets) for work in padded])
        result = aligned_rows(len(padded), self._numel, works[0].values)[:, : self._numel]
        with torch.no_grad():
            batch = _Batch(padded, self._stack_small(padded), result)
            outputs, tape = self._forward(batch)
            losses, gradient = _loss_gradients(self._loss, outputs, targets)
            self._backward(batch, tape, gradient)
        return result[: len(works)], losses[: len(works)]

    def _stack_small(self, works: Sequence[GradientWork]) -> dict[str, Tensor]:
        """Stack each small parameter of all works to (works, *its shape)."""
        small = {}
        for run, rows in self._small:
            start, stop = run[0].start, run[-1].stop
            stacked = rows.stack([work.values[start:stop] for work in works])
            for layer in run:
                small[layer.name] = stacked[:, layer.start - start : layer.stop - start].view(-1, *layer.shape)
        return small

    def _stack_inputs(self, works: Sequence[GradientWork]) -> Tensor:
        """Stack the inputs of all works to (works, batch, features)."""
        inputs = [_single(work) for work in works]
        if self._inputs is None or self._inputs.shape != inputs[0].shape:
            self._inputs = StackMemory(inputs[0].shape, inputs[0])
        return self._inputs.stack(inputs).flatten(2)

    def _forward(self, batch: _Batch) -> tuple[Tensor, list[Any]]:
        """The outputs, and the tensors that each step's backward pass needs."""
        first = self._steps[0]
        inputs: Tensor | list[Tensor]
        if isinstance(first, _Linear) and first.large:
            inputs = [_single(work).flatten(1) for work in batch.works]
        else:
            inputs = self._stack_inputs(batch.works)
        tape: list[Any] = []
        for step in self._steps:
            saved: Any = inputs
            if isinstance(step, _Linear) and step.large:
                saved = inputs if isinstance(inputs, list) else inputs.unbind()
                inputs = _large_products(batch, step, saved)
            else:
                assert isinstance(inputs, Tensor)
                if isinstance(step, _Linear):
                    inputs = _small_products(batch, step, inputs)
                else:
                    inputs, saved = _activate(step, inputs)
            tape.append(saved)
        assert isinstance(inputs, Tensor)
        return inputs, tape

    def _backward(self, batch: _Batch, tape: Sequence[Any], gradient: Tensor) -> None:
        """Run the steps backwards, and write each parameter's gradient to its slice of the result."""
        for index in range(len(tape) - 1, self._first - 1, -1):
            step, saved = self._steps[index], tape[index]
            if not isinstance(step, _Linear):
                gradient = _activation_gradient(step, saved, gradient)
                continue
            if step.bias is not None:
                torch.sum(gradient, 1, out=part_of(batch.result, step.bias))
            products = part_of(batch.result, step.weight)
            if step.large:
                for left, right, out in zip(gradient.mT.unbind(), saved, products.unbind(), strict=True):
                    torch.mm(left, right, out=out)
            else:
                torch.bmm(gradient.mT, saved, out=products)
            if index > self._first:
                gradient = _input_gradient(batch, step, gradient)


def _runs(replica: Replica, large: Collection[str]) -> list[list[Layer]]:
    """The parameters that are not in `large`, in runs that are contiguous in the flat vector."""
    runs: list[list[Layer]] = []
    for layer in replica.layers:
        if layer.name in large:
            continue
        if runs and runs[-1][-1].stop == layer.start:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _weights(batch: _Batch, layer: Layer) -> Iterator[Tensor]:
    """A view of the weight in each work's own values."""
    for work in batch.works:
        yield work.values[layer.start : layer.stop].view(layer.shape)


def _small_products(batch: _Batch, step: _Linear, inputs: Tensor) -> Tensor:
    weight = batch.small[step.weight.name].mT
    if step.bias is None:
        return torch.bmm(inputs, weight)
    return torch.baddbmm(batch.small[step.bias.name].unsqueeze(1), inputs, weight)


def _large_products(batch: _Batch, step: _Linear, inputs: Sequence[Tensor]) -> Tensor:
    outputs = inputs[0].new_empty(len(inputs), len(inputs[0]), step.weight.shape[0])
    for row, weight, out in zip(inputs, _weights(batch, step.weight), outputs.unbind(), strict=True):
        torch.mm(row, weight.mT, out=out)
    if step.bias is not None:
        outputs += batch.small[step.bias.name].unsqueeze(1)
    return outputs


def _input_gradient(batch: _Batch, step: _Linear, gradient: Tensor) -> Tensor:
    if not step.large:
        return torch.bmm(gradient, batch.small[step.weight.name])
    result = gradient.new_empty(*gradient.shape[:2], step.weight.shape[1])
    for row, weight, out in zip(gradient.unbind(), _weights(batch, step.weight), result.unbind(), strict=True):
        torch.mm(row, weight, out=out)
    return result


def _pad(rows: Tensor) -> Tensor:
    """Flatten rows and pad them with zeros to a multiple of _ALIGNMENT elements."""
    flat = rows.flatten(1)
    spare = -flat.shape[1] % _ALIGNMENT
    return functional.pad(flat, (0, spare)) if spare else flat


def _activate(activation: nn.Module, inputs: Tensor) -> tuple[Tensor, Any]:
    """The output of an activation, and the tensors for its backward pass: by hand for ReLU, else by autograd."""
    if type(activation) is nn.ReLU:
        after = inputs.relu()
        return after, after
    before = inputs.detach().requires_grad_()
    with torch.enable_grad():
        rows = _pad(before)
        in_place = getattr(activation, "inplace", False)
        after = activation(rows.clone() if in_place else rows)
    return after.detach()[:, : inputs[0].numel()].view(inputs.shape), (before, after)


def _activation_gradient(activation: nn.Module, saved: Any, gradient: Tensor) -> Tensor:
    if type(activation) is nn.ReLU:
        return gradient.masked_fill_(saved <= 0, 0)
    before, after = saved
    (gradient,) = torch.autograd.grad(after, before, _pad(gradient).view(after.shape))
    return gradient


def _loss_gradients(loss: Loss, outputs: Tensor, targets: Batch) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its gradient by the row's outputs, in memory that the caller may overwrite."""
    if loss is functional.cross_entropy and isinstance(targets, Tensor) and _are_labels(targets):
        return _cross_entropy(outputs, targets)
    outputs = outputs.detach().requires_grad_()
    with torch.enable_grad():
        losses = torch.func.vmap(loss)(outputs, targets)
        (gradient,) = torch.autograd.grad(losses, outputs, torch.ones_like(losses))
    return losses.detach(), gradient.clone()


def _are_labels(targets: Tensor) -> bool:
    """Whether targets have shape (rows, batch) and one label per sample."""
    return targets.dim() == 2 and not targets.is_floating_point()


def _cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The cross entropy of `outputs` (rows, batch, classes) at `targets` (rows, batch), by row, and its gradient.

    The loss is the mean of -log softmax at the label, the gradient (softmax - one-hot) / batch. Samples with the label
    -100 do not count, as in PyTorch.
    """
    counted = targets != -100
    share = (counted / counted.sum(1, keepdim=True, dtype=outputs.dtype)).to(outputs.dtype).unsqueeze(2)
    labels = targets.masked_fill(~counted, 0).unsqueeze(2)
    logs = outputs.log_softmax(2)
    losses = -(logs.gather(2, labels) * share).sum((1, 2))
    gradient = logs.exp_().mul_(share)
    return losses, gradient.scatter_add_(2, labels, -share)


def _read_chain(replica: Replica, work: GradientWork) -> list[_Linear | nn.Module] | None:
    """The steps from inputs to outputs; None unless all of them are dense layers and activations."""
    if type(replica.module) is not nn.Sequential or not _is_single(work):
        return None
    inputs = _single(work)
    if inputs.dtype != replica.dtype or inputs.dim() < 2:
        return None
    modules = list(_leaves(replica.module))
    flattens = bool(modules) and type(modules[0]) is nn.Flatten
    width = inputs[0].numel() if flattens else inputs.shape[-1]
    if inputs.dim() > 2 and not flattens:
        return None
    places = dict(zip(map(id, replica.parameters), replica.layers, strict=True))
    steps: list[_Linear | nn.Module] = []
    for module in modules:
        if type(module) is nn.Linear:
            layer = _place(module, places)
            if layer is None or module.in_features != width:
                return None
            width = module.out_features
            steps.append(layer)
        elif type(module) in _ACTIVATIONS:
            steps.append(module)
        elif type(module) is not nn.Identity and not _flattens_samples(module):
            return None
    return None if places else steps


def _leaves(module: nn.Sequential) -> Iterator[nn.Module]:
    for child in module:
        if type(child) is nn.Sequential:
            yield from _leaves(child)
        else:
            yield child


def _flattens_samples(module: nn.Module) -> bool:
    return isinstance(module, nn.Flatten) and module.start_dim == 1 and module.end_dim == -1


def _place(module: nn.Linear, places: dict[int, Layer]) -> _Linear | None:
    """Remove the layer's parameters from `places`. None if they are frozen or belong to an earlier layer too."""
    weight = places.pop(id(module.weight), None)
    bias = None if module.bias is None else places.pop(id(module.bias), None)
    if weight is None or (module.bias is not None and bias is None):
        return None
    return _Linear(weight, bias, large=module.weight.nbytes >= LARGE)


def _is_single(work: GradientWork) -> bool:
    """Whether the inputs are one tensor: alone, in a tuple, or by the name of `Sequential`'s argument."""
    inputs = present(work.inputs)
    if isinstance(inputs, Mapping):
        return list(inputs) == ["input"]
    return isinstance(inputs, Tensor) or len(inputs) == 1


def _single(work: GradientWork) -> Tensor:
    (inputs,) = tensors(present(work.inputs))
    return inputs


# ---- the check of a way

_TRIAL = 64
"""Gradients in the largest stack that the check tries."""


def find_fault(
    stacked: Stacked, work: GradientWork, most: int, alone: Callable[[GradientWork], Gradient]
) -> str | None:
    """The reason not to compute works of the shapes of `work` by `stacked`; None if there is none.

    The check computes the same works in stacks of several sizes and orders, whose bits must be equal. It computes two
    of them by `alone` too, whose result must agree to about half of the dtype's digits.
    """
    trial = [_variant(work, shift) for shift in range(min(most, _TRIAL))]
    try:
        with warnings.catch_warnings(), explain_user_errors("a stack raised"):
            warnings.simplefilter("error", UserWarning)  # vmap warns if it falls back to a loop
            values, losses = stacked.evaluate(trial)
    except DureError as error:  # code of the user that computes one at a time may raise anything on a stack
        return str(error.__cause__ or error).strip().split("\n")[0]
    for stack in _stacks(len(trial), stacked.fewest):
        again, again_losses = stacked.evaluate([trial[index] for index in stack])
        if not (_same_bits(again, values[stack]) and _same_bits(again_losses, losses[stack])):
            return f"bits depend on the other gradients of a stack, here of {len(stack)}"
    for index in (0, len(trial) - 1):
        reference = alone(trial[index]).values
        error_size = (values[index] - reference).norm()
        if reference.isfinite().all() and not error_size <= torch.finfo(reference.dtype).eps ** 0.5 * reference.norm():
            return f"the gradient differs from the one computed alone by {float(error_size):.2g}"
    return None


def _stacks(count: int, fewest: int) -> Iterator[list[int]]:
    """The stacks to compare: indices of works, in several numbers and orders."""
    everyone = list(range(count))
    yield everyone[::-1]
    for size in (1, 2, 3, fewest, count // 2 + 1, count - 1):
        if fewest <= size <= count:
            yield everyone[-size:]
            yield everyone[:size][::-1]


def _variant(work: GradientWork, shift: int) -> GradientWork:
    """A work of the same shapes with other values."""
    return replace(
        work,
        values=work.values.roll(shift),
        inputs=mapped(lambda each: each.roll(shift, 0), present(work.inputs)),
        targets=mapped(lambda each: each.roll(shift + 1 if shift else 0, 0), present(work.targets)),
    )


def _same_bits(left: Tensor, right: Tensor) -> bool:
    # as bytes: as floats, NaN would differ from itself, and 0 equal -0
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
