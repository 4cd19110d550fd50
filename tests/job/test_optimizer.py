"""Flat optimizers: what PyTorch's do, whole or in slices."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support.wording import raising

from dure.core.state import State
from dure.errors import StrategyError
from dure.job.optimizer import BLOCK, TORCH_FORMS, FlatOptimizer, GroupRange, OptimizerSpec, RangesOptimizer, restrict

PAGE = Path(__file__).parents[2] / "docs" / "explanations" / "decisions" / "0007-rules-on-flat-vectors.md"

SPECS = {
    "sgd": OptimizerSpec("sgd", lr=0.05),
    "sgd, decay": OptimizerSpec("sgd", lr=0.05, weight_decay=0.01),
    "sgd with momentum": OptimizerSpec("sgd", lr=0.05, momentum=0.8),
    "momentum": OptimizerSpec("momentum", lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": OptimizerSpec("momentum", lr=0.05, nesterov=True),
    "adagrad": OptimizerSpec("adagrad", lr=0.1),
    "adagrad, decay": OptimizerSpec("adagrad", lr=0.1, weight_decay=0.01),
    "adam": OptimizerSpec("adam", lr=0.01),
    "adam, decay": OptimizerSpec("adam", lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    "adamw": OptimizerSpec("adamw", lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    "adamw, no decay": OptimizerSpec("adamw", lr=0.01),
    "rmsprop": OptimizerSpec("rmsprop", lr=0.01, eps=1.5e-7),
    "rmsprop, decay": OptimizerSpec("rmsprop", lr=0.01, decay=0.9, weight_decay=0.1),
}
NUMEL = BLOCK + 1237
STEPS = 5


def reference(spec: OptimizerSpec, params: list[dict[str, object]]) -> torch.optim.Optimizer:
    if spec.name in ("sgd", "momentum"):
        return torch.optim.SGD(
            params, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay
        )
    if spec.name == "adagrad":
        return torch.optim.Adagrad(params, lr=spec.lr, weight_decay=spec.weight_decay, eps=spec.eps)
    kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    return kind(params, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, eps=spec.eps)


def numbers(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(NUMEL, generator=generator, dtype=dtype) for _ in range(STEPS + 1)]
    return draw[0], draw[1:]


def run(optimizer: FlatOptimizer, values: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """In place on even steps, into a second buffer on odd ones."""
    current, spare = values.clone(), torch.empty_like(values)
    for step, gradient in enumerate(gradients):
        if step % 2:
            optimizer.apply(current, gradient, spare)
            current, spare = spare, current
        else:
            optimizer.apply(current, gradient, current)
    return current


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in SPECS if SPECS[name].name != "rmsprop"])
def test_equals_pytorch_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    values, gradients = numbers(0, dtype)
    theirs = torch.nn.Parameter(values.clone())
    optimizer = reference(SPECS[name], [{"params": [theirs]}])
    for gradient in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
    ours = run(FlatOptimizer(SPECS[name], NUMEL, dtype), values, gradients)
    assert not torch.equal(ours, values)
    assert torch.equal(ours, theirs.detach())


def functional_step(
    form: str, spec: OptimizerSpec, params: torch.Tensor, gradient: torch.Tensor, state: list[list[torch.Tensor | None]]
) -> None:
    """Make one step in place by a functional form of `torch.optim`."""
    settings = {"lr": spec.lr, "weight_decay": spec.weight_decay, "maximize": False, "foreach": False}
    if form == "sgd":
        settings |= {"momentum": spec.momentum, "dampening": 0.0, "nesterov": spec.nesterov, "fused": False}
    elif form == "rmsprop":
        settings |= {"alpha": spec.decay, "eps": spec.eps, "momentum": 0.0, "centered": True}
    elif form == "adagrad":
        settings |= {"eps": spec.eps, "lr_decay": 0.0, "fused": False}
    else:
        settings |= {"eps": spec.eps, "beta1": spec.betas[0], "beta2": spec.betas[1], "amsgrad": False, "fused": False}
    getattr(import_module(f"torch.optim.{form}"), form)([params], [gradient], *state, **settings)


ROWS = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`|none) \| (equal|differ|) *\|", PAGE.read_text(encoding="utf-8"), re.M)


def test_the_page_has_every_rule() -> None:
    assert [name for name, *_ in ROWS] == ["sgd", "momentum", "adagrad", "adam", "adamw", "rmsprop", "assign", "add"]
    assert {name for name, _, bits in ROWS if bits == "equal"} == set(TORCH_FORMS)
    assert all(TORCH_FORMS[name].kind.__name__.lower() == form for name, form, bits in ROWS if bits == "equal")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECS)
def test_the_page_says_which_functional_forms_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    ((form, bits),) = [row[1:] for row in ROWS if row[0] == spec.name]
    values, gradients = numbers(6, dtype)
    ours = FlatOptimizer(spec, NUMEL, dtype)
    theirs, vectors, clock = values.clone(), [vector.clone() for vector in ours.vectors.values()], torch.tensor(0.0)
    state = [[vector] for vector in vectors] or [[None]]
    if form != "sgd":
        state += [[clock]] if form == "adagrad" else [[], [clock]]
    for gradient in gradients:
        functional_step(form, spec, theirs, gradient, state)
    found = [run(ours, values, gradients), *ours.vectors.values()]
    same = [torch.equal(left, right) for left, right in zip(found, [theirs, *vectors], strict=True)]
    assert all(same) == (bits == "equal")


def two_rmsprop_steps(gradient: float) -> list[float]:
    optimizer = FlatOptimizer(OptimizerSpec("rmsprop", lr=6.25e-5, eps=1.5e-7), 1, torch.float64)
    values = torch.zeros(1, dtype=torch.float64)
    found = []
    for _ in range(2):
        optimizer.apply(values, torch.full_like(values, gradient), values)
        found.append(float(values))
    return found


def test_rmsprop_has_its_eps_inside_the_root() -> None:
    """Outside the root, as in PyTorch, the steps from 1e-4 end at -2.848e-4 and -4.944e-4."""
    assert two_rmsprop_steps(1e-4) == pytest.approx([-1.611e-5, -3.220e-5], abs=5e-9)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.RMSprop([parameter], lr=6.25e-5, alpha=0.95, eps=1.5e-7, centered=True)
    for expected in two_rmsprop_steps(0.5):
        parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        assert expected == pytest.approx(parameter.item(), rel=1e-5)


def test_rmsprop_follows_its_formula() -> None:
    values, gradients = numbers(5, torch.float64)
    n, m, theta = torch.zeros_like(values), torch.zeros_like(values), values.clone()
    for g in gradients:
        n, m = 0.95 * n + 0.05 * g**2, 0.95 * m + 0.05 * g
        theta = theta - 0.01 * g / torch.sqrt(n - m**2 + 1.5e-7)
    ours = run(FlatOptimizer(SPECS["rmsprop"], NUMEL, torch.float64), values, gradients)
    torch.testing.assert_close(ours, theta, rtol=1e-12, atol=1e-12)


def test_rmsprop_stays_finite_where_the_gradient_is_constant() -> None:
    values = torch.zeros(1000)
    optimizer = FlatOptimizer(OptimizerSpec("rmsprop", eps=1e-12), 1000)
    gradient = torch.linspace(1, 1000, 1000)
    for _ in range(400):
        optimizer.apply(values, gradient, values)
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("name", SPECS)
def test_a_slice_does_what_the_whole_does(name: str) -> None:
    values, gradients = numbers(1, torch.float32)
    whole = run(FlatOptimizer(SPECS[name], NUMEL), values, gradients)
    for start, stop in [(0, 1), (1, 18), (17, BLOCK + 5), (BLOCK - 3, NUMEL)]:
        part = run(FlatOptimizer(SPECS[name], stop - start), values[start:stop], [g[start:stop] for g in gradients])
        assert torch.equal(part, whole[start:stop])


def test_neither_values_nor_gradient_are_touched() -> None:
    for spec in SPECS.values():
        values, (gradient, *_) = numbers(2, torch.float32)
        kept = values.clone(), gradient.clone()
        FlatOptimizer(spec, NUMEL).apply(values, gradient, torch.empty_like(values))
        assert torch.equal(values, kept[0])
        assert torch.equal(gradient, kept[1])


def test_segments_are_parameter_groups() -> None:
    values, gradients = numbers(3, torch.float32)
    spec = OptimizerSpec("adam", lr=0.01, weight_decay=0.1)
    bounds = [(0, 100), (100, 5000), (5000, NUMEL)]
    groups = [{}, {"lr": 0.5, "weight_decay": 0.0}, {"betas": (0.5, 0.9)}]
    theirs = [torch.nn.Parameter(values[a:b].clone()) for a, b in bounds]
    optimizer = reference(spec, [{"params": [p], **group} for p, group in zip(theirs, groups, strict=True)])
    for gradient in gradients:
        for parameter, (a, b) in zip(theirs, bounds, strict=True):
            parameter.grad = gradient[a:b].clone()
        optimizer.step()
    segments = [(*bound, group) for bound, group in zip(bounds, groups, strict=True) if group]
    ours = run(FlatOptimizer(spec, NUMEL, segments=segments), values, gradients)
    assert torch.equal(ours, torch.cat([p.detach() for p in theirs]))


def test_rates_of_a_step_replace_those_of_the_specification() -> None:
    values, gradient = torch.zeros(4), torch.ones(4)
    optimizer = FlatOptimizer(OptimizerSpec(lr=1.0), 4, segments=[GroupRange(2, 4, {"lr": 2.0}, group=1)])
    out = torch.empty(4)
    optimizer.apply(values, gradient, out)
    assert out.tolist() == [-1, -1, -2, -2]
    optimizer.apply(values, gradient, out, lr=3.0)
    assert out.tolist() == [-3, -3, -3, -3]
    optimizer.apply(values, gradient, out, lr=[4.0, 5.0])
    assert out.tolist() == [-4, -4, -5, -5]


def test_segments_follow_the_ranges_of_a_shard() -> None:
    segments = [GroupRange(0, 10, {"lr": 1.0}), GroupRange(20, 30, {"lr": 2.0}, 1)]
    assert restrict(segments, [(5, 8), (12, 25)]) == [GroupRange(0, 3, {"lr": 1.0}), GroupRange(11, 16, {"lr": 2.0}, 1)]


@pytest.mark.parametrize("ranges", [[(0, 2)], [(3, 4)], []])
def test_each_part_of_a_model_has_the_vectors_of_all_its_groups(ranges: list[tuple[int, int]]) -> None:
    segments = [GroupRange(2, 4, {"momentum": 0.9})]
    part = RangesOptimizer(OptimizerSpec("sgd"), ranges, torch.float32, segments=segments)
    assert {name: len(each) for name, each in part.vectors.items()} == {"velocity": sum(b - a for a, b in ranges)}


def test_state_goes_on_where_it_stopped() -> None:
    for spec in SPECS.values():
        values, gradients = numbers(4, torch.float32)
        whole = run(FlatOptimizer(spec, NUMEL), values, gradients)
        first, second = FlatOptimizer(spec, NUMEL), FlatOptimizer(spec, NUMEL)
        middle = run(first, values, gradients[:2])
        second.restore(first.state())
        assert torch.equal(run(second, middle, gradients[2:]), whole)
    with raising(ValueError, "velocity"):
        FlatOptimizer(SPECS["momentum"], 4).restore(State({"squares": torch.zeros(4)}, {"steps": 1}))


def test_assign_keeps_what_it_is_given() -> None:
    out = torch.zeros(3)
    FlatOptimizer(OptimizerSpec("assign"), 3).apply(torch.ones(3), torch.tensor([1.0, 2.0, 3.0]), out)
    assert out.tolist() == [1, 2, 3]


@pytest.mark.parametrize("spec", SPECS.values())
def test_text_form_reads_back(spec: OptimizerSpec) -> None:
    assert OptimizerSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adma", "adma"),
        ("rmsprp", "rmsprp"),
        ("rmsprop:decay=1", "least 0"),
        ("assign", "assign"),
        ("add:lr=1", "add"),
        ("sgd+momentum", "names 2"),
        ("sgd:lr=-1", "0"),
        ("sgd:lr=nan", "must"),
        ("sgd:momentum=1", "and 1"),
        ("adam:betas=0.9", "numbers"),
        ("sgd:nesterov=true", "momentum"),
        ("sgd:rate=1", "rate"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    with raising(StrategyError, message):
        OptimizerSpec.parse(text)


def test_overlapping_segments_are_refused() -> None:
    with raising(ValueError, "2"):
        FlatOptimizer(OptimizerSpec(), 8, segments=[(0, 3, {}), (2, 6, {})])
