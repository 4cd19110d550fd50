"""Codecs under DistributedDataParallel: two and three real processes, a plain PyTorch script."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.wording import raising

import dure
from dure.codec import CATALOGUE
from dure.codec.ternary import Ternary
from dure.errors import StrategyError

TRAIN = """
import json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dure

codec, steps = sys.argv[1], int(sys.argv[2])
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
model = DistributedDataParallel(net, bucket_cap_mb=0.0004)
hook = None
if codec != "none":
    hook = dure.hook(codec, dist.new_group() if codec == "fp32" else None)
    model.register_comm_hook(None, hook)
signs = codec.startswith(("sign", "ternary", "it-sign")) and "scaled" not in codec
optimizer = torch.optim.SGD(model.parameters(), lr=0.003 if signs else 0.1)
generator = torch.Generator().manual_seed(rank)
truth = torch.randn(20, 3, generator=torch.Generator().manual_seed(7))
losses = []
for step in range(steps):
    x = torch.randn(16, 20, generator=generator)
    loss = torch.nn.functional.cross_entropy(model(x), (x @ truth).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
everybody = [torch.empty_like(flat) for _ in range(world_size)]
dist.all_gather(everybody, flat)
same = all(torch.equal(each, flat) for each in everybody)
if rank == 0:
    sent = hook.bytes_sent if hook else 0
    print(json.dumps({"same": same, "first": losses[0], "last": sum(losses[-10:]) / 10, "sent": sent,
                      "params": flat.tolist()[:50]}), flush=True)
"""
STEPS = 60
RANKS = """
import os, runpy, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
for program in sys.argv[1:]:
    sys.argv = program.split()
    if not dist.is_initialized() and not sys.argv[0].endswith("early.py"):
        dist.init_process_group("gloo")
    runpy.run_path(sys.argv[0])
sys.stdout.flush()
os._exit(0)
"""
"""Runs programs one after another; `early.py` must be the first. It ends without the end of the interpreter: there
PyTorch aborts about one process in thirty, with or without a hook, on a busy machine."""
NUMEL = 20 * 40 + 40 + 40 * 3 + 3


def run(folder, *programs, processes=2):
    """What each program prints, as `{"name arguments": values}`; ranks start once for all of them."""
    for name, script in SCRIPTS.items():
        (folder / f"{name}.py").write_text(script)
    (folder / "ranks.py").write_text(RANKS)
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
         str(folder / "ranks.py"), *(f"{folder}/{program.replace(' ', '.py ', 1)}" for program in programs)],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(programs, map(json.loads, done.stdout.splitlines()), strict=True))


PAIR = ("early 1bit", "train none 5", "train fp32 5", "overflow 1bit", "uncalled sign+momentum")
LONG_PAIR = ("dtypes all", "hard sign")
"""Programs of tests for `make all`."""
THREE = (f"train sign {STEPS}", "restart 1bit", "columns 1bit:feedback=false")


@pytest.fixture(scope="module")
def pair(tmp_path_factory, request):
    """Of two ranks; without the long programs in `make test`."""
    programs = PAIR if "not long" in request.config.option.markexpr else PAIR + LONG_PAIR
    return run(tmp_path_factory.mktemp("pair"), *programs)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Of three ranks."""
    return run(tmp_path_factory.mktemp("three"), *THREE, processes=3)


def test_nothing_is_changed_by_what_loses_nothing(pair):
    plain, hooked = pair["train none 5"], pair["train fp32 5"]
    assert hooked["params"] == plain["params"]
    assert hooked["sent"] == 4 * (NUMEL * 4)  # the first step travels whole; half of each vector goes out, twice


@pytest.mark.long
def test_three_ranks_stay_equal_and_learn(three):
    check_equal_and_learned(three[f"train sign {STEPS}"])


@pytest.mark.soak
def test_ranks_stay_equal_and_learn_with_other_codecs(tmp_path):
    codecs = ("1bit", "it-sign:start=5", "strom:threshold=0.02")
    for found in run(tmp_path, *(f"train {codec} {STEPS}" for codec in codecs)).values():
        check_equal_and_learned(found)


def check_equal_and_learned(found):
    assert found["same"]
    assert found["last"] < 0.75 * found["first"]
    assert 0 < found["sent"] < (STEPS - 1) * NUMEL * 4 * 0.3


RESTART = """
import copy, io, json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dure
from dure.errors import CheckpointError

codec = sys.argv[1]
generator = torch.Generator().manual_seed(dist.get_rank())
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))

def hooked(state=None, cap=0.0004):
    model, hook = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=cap), dure.hook(codec)
    model.register_comm_hook(None, hook)
    if state is not None:
        hook.load_state_dict(state)
    return model, hook

def gradient(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([each.grad.view(-1) for each in model.parameters()])

batches = torch.randn(7, 16, 20, generator=generator)
model, hook = hooked()
for x in batches[:6]:
    gradient(model, x)
file = io.BytesIO()
torch.save(hook.state_dict(), file)
file.seek(0)
state = torch.load(file, weights_only=True)
expected, found = gradient(model, batches[6]), {}
for name, given in (("loaded", state), ("fresh", None)):
    model, hook = hooked(given)
    gradient(model, batches[0])
    found[name] = torch.equal(gradient(model, batches[6]), expected)
later, hook = hooked()
gradient(later, batches[0]), gradient(later, batches[1])
hook.load_state_dict(state)
found["loaded later"] = torch.equal(gradient(later, batches[6]), expected)
later, hook = hooked(state)
found["at once"] = hook.state_dict()["buckets"].keys() == state["buckets"].keys()
errors = []
for wrong in ({"codec": "fp32"}, {"world_size": 2}, {"buckets": {0: {"bounds": [1, 2], "tensors": {}}}}):
    try:
        later, hook = hooked()
        gradient(later, batches[0]), gradient(later, batches[1])
        hook.load_state_dict({**state, **wrong})
    except CheckpointError as error:
        errors.append(str(error))
found["errors"] = errors
if dist.get_rank() == 0:
    print(json.dumps(found), flush=True)
"""


@pytest.mark.long
def test_a_hook_goes_on_from_its_state(three):
    check_restart(three["restart 1bit"])


@pytest.mark.soak
def test_hooks_of_other_codecs_go_on_from_their_states(tmp_path):
    codecs = ("strom:threshold=0.02", "it-sign:start=1,granularity=coordinate")
    for found in run(tmp_path, *(f"restart {codec}" for codec in codecs), processes=3).values():
        check_restart(found)


def check_restart(found):
    assert found["loaded"]
    assert found["loaded later"]
    assert not found["fresh"]
    assert found["at once"]
    codec_error, size_error, bucket_error = found["errors"]
    assert "codec=fp32, and this hook has codec=" in codec_error
    assert "world_size=2, and this hook has world_size=3" in size_error
    assert "bucket 0 of DistributedDataParallel had its parameters end at [1, 2]" in bucket_error


HARD = """
import json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dure

codec = sys.argv[1]

def hooked(net, codec=codec, **options):
    model = DistributedDataParallel(net, **options)
    model.register_comm_hook(None, dure.hook(codec))
    return model

class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(64, 8), torch.nn.Linear(5, 5)

    def forward(self, x):
        return self.used(x)

found, x = {}, torch.ones(4, 64)
up, down = (hooked(torch.nn.Linear(64, 8, bias=False)) for _ in range(2))
wrong = 0
for step in range(60):
    (up(x).sum() - down(x).sum()).backward()  # one backward pass, two models
    wrong += not bool((up.module.weight.grad > 0).all() and (down.module.weight.grad < 0).all())
    up.zero_grad(), down.zero_grad()
found["wrong"] = wrong
model = hooked(Unused(), find_unused_parameters=True)
for step in range(20):
    model(x).square().mean().backward()
found["unused"] = model.module.used.weight.grad.abs().sum().item()
model = hooked(torch.nn.Linear(64, 8).bfloat16())
for step in range(3):
    model.zero_grad()
    model(x.bfloat16()).sum().backward()
found["narrow"] = [str(model.module.weight.grad.dtype), bool((model.module.weight.grad > 0).all())]
shared = dure.hook(codec)
first, second = (DistributedDataParallel(torch.nn.Linear(64, 8)) for _ in range(2))
for each in (first, second):
    each.register_comm_hook(None, shared)
first(x).sum().backward()
try:
    second(x).sum().backward()
except dure.DureError as error:
    found["shared"] = str(error)
model = hooked(torch.nn.Linear(64, 8).double(), "int8")
model(x.double()).sum().backward()
try:
    (model(x.double()).sum() * 1e300).backward()
except RuntimeError as error:
    found["error"] = str(error)
if dist.get_rank() == 0:
    print(json.dumps(found), flush=True)
"""


@pytest.mark.long
def test_two_models_unused_parameters_and_narrow_numbers(pair):
    check_hard(pair["hard sign"])


@pytest.mark.soak
def test_two_models_unused_parameters_and_narrow_numbers_with_messages_of_any_length(tmp_path):
    check_hard(run(tmp_path, "hard strom:threshold=0.1")["hard strom:threshold=0.1"])


def check_hard(found):
    assert found["shared"].startswith("a dure.hook was registered with two models")
    assert found["wrong"] == 0
    assert found["unused"] > 0
    assert found["narrow"] == ["torch.bfloat16", True]
    assert "its codec sends float32, whose largest number is 3.4e+38, so it was not encoded" in found["error"]
    assert "cast" not in found["error"]


OVERFLOW = """
import json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dure

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
model, hook = DistributedDataParallel(net), dure.hook(sys.argv[1])
model.register_comm_hook(None, hook)
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0)
generator = torch.Generator().manual_seed(dist.get_rank())
residuals, scales, sent, parameters = [], [], [], []
for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 20, generator=generator)).square().mean()
    factor = float("inf") if step in (4, 5) and dist.get_rank() == 1 else 1
    scaler.scale(loss * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    state = hook.state_dict()["buckets"].get(0, {"tensors": {}})["tensors"]
    residuals.append(all(kept.isfinite().all() for kept in state.values()))
    scales.append(scaler.get_scale())
    sent.append(hook.bytes_sent)
    parameters.append(torch.cat([each.detach().view(-1) for each in model.parameters()]))
everybody = [torch.empty_like(parameters[-1]) for _ in range(2)]
dist.all_gather(everybody, parameters[-1])
if dist.get_rank() == 0:
    print(json.dumps({
        "residuals": bool(all(residuals)), "scales": scales, "sent": sent, "same": torch.equal(*everybody),
        "steps": [not torch.equal(a, b) for a, b in zip(parameters, parameters[1:])],
    }), flush=True)
"""


def test_a_gradient_scaler_skips_a_step_that_overflows_on_one_rank(pair):
    check_overflow(pair["overflow 1bit"])


@pytest.mark.soak
def test_a_gradient_scaler_skips_a_step_with_other_codecs(tmp_path):
    for found in run(tmp_path, "overflow sign+momentum", "overflow strom:threshold=0.02").values():
        check_overflow(found)


def check_overflow(found):
    """The gradient of rank 1 overflows in two steps; rank 0 reports."""
    assert found["same"]
    assert found["residuals"]
    assert found["scales"] == [2, 2, 2, 2, 1, 0.5, 0.5, 0.5]
    assert found["steps"] == [True, True, True, False, False, True, True]
    sent = [later - sooner for sooner, later in pairwise(found["sent"])]
    assert [bool(each) for each in sent] == [True, True, True, False, False, True, True]


@pytest.mark.long
def test_columns_are_those_of_the_parameters(three):
    """Of one rank: a weight's gradient becomes the two means of each of its rows, a bias's stays."""
    found = three["columns 1bit:feedback=false"]
    assert found["weight"] < 1e-6
    assert found["bias"] == 0


COLUMNS = """
import copy, json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dure

torch.manual_seed(0)
net = torch.nn.Linear(20, 3)
alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
model = DistributedDataParallel(copy.deepcopy(net), process_group=alone)
model.register_comm_hook(None, dure.hook(sys.argv[1], alone))
x = torch.randn(16, 20)
for _ in range(2):  # the first step travels whole
    model.zero_grad()
    model(x).square().mean().backward()
net(x).square().mean().backward()
expected = net.weight.grad.clone()
for row in expected:
    for sign in (row >= 0, row < 0):
        row[sign] = row[sign].mean()
difference = (model.module.weight.grad - expected).abs().max().item()
if dist.get_rank() == 0:
    bias = (model.module.bias.grad - net.bias.grad).abs().max().item()
    print(json.dumps({"weight": difference, "bias": bias}), flush=True)
"""


EARLY = """
import copy, json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dure

codec = sys.argv[1]
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
hooks = {"early": dure.hook(codec), "first": dure.hook(codec)}
errors = []
for use in (hooks["early"].state_dict, lambda: hooks["early"].group):
    try:
        use()
    except dure.DureError as error:
        errors.append(str(error))
dist.init_process_group("gloo")
hooks["late"] = dure.hook(codec)
models = {}
for name in ("early", "late", "first"):  # groups are made in the order of first backwards
    models[name] = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=0.0004)
    models[name].register_comm_hook(None, hooks[name])
state = hooks["first"].state_dict()
batches = torch.randn(5, 16, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
gradients = {}
for name, model in models.items():
    for x in batches:
        model.zero_grad()
        model(x).square().mean().backward()
    gradients[name] = torch.cat([each.grad.view(-1) for each in model.parameters()])
if dist.get_rank() == 0:
    print(json.dumps({
        "same": all(torch.equal(each, gradients["late"]) for each in gradients.values()),
        "sent": [hook.bytes_sent for hook in hooks.values()],
        "rank": state["rank"],
        "errors": errors,
    }), flush=True)
"""


def test_a_hook_that_was_made_before_the_ranks_is_the_same(pair):
    found = pair["early 1bit"]
    assert found["same"]
    assert found["rank"] == 0
    assert min(found["sent"]) == max(found["sent"]) > 0
    assert all("init_process_group before the first backward" in error for error in found["errors"])
    assert len(found["errors"]) == 2


DTYPES = """
import json, sys, warnings
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dure
from dure.codec import CATALOGUE

EXACT = {"sign": "sign", "ternary": "ternary", "it-sign": "it-sign:start=1", "strom": "strom:threshold=1",
         "top-k": "top-k:share=1"}  # with these parameters each codec loses nothing of the gradients below
REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MIXED = (*REAL, torch.complex64, torch.complex128)
rank, world_size = dist.get_rank(), dist.get_world_size()

class Mixed(torch.nn.Module):
    # a matrix and a vector of each type, an empty parameter and a number

    def __init__(self, *dtypes):
        super().__init__()
        shapes = [(dtype, shape) for dtype in dtypes for shape in ((5, 37), (9,))]
        shapes += [(torch.float32, (0,)), (torch.complex64, ())] if len(dtypes) > 1 else []
        self.own = torch.nn.ParameterList(torch.ones(shape).to(dtype) for dtype, shape in shapes)

    def forward(self, gradients):
        products = (p.to(g.dtype) * g.conj() for p, g in zip(self.own, gradients))
        return sum((product.real if product.is_complex() else product).double().sum() for product in products)

def hooked(codec, *dtypes, **options):
    model = DistributedDataParallel(Mixed(*dtypes), **options)
    if codec:
        model.register_comm_hook(None, dure.hook(codec))
    return model

def drawn(model, of, signs):
    generator, found = torch.Generator().manual_seed(of), []
    for parameter in model.module.own:
        shape = (*parameter.shape, 2) if parameter.is_complex() else parameter.shape
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        values = torch.where(values > 0, 1.0, -1.0).double() if signs else values
        found.append((torch.view_as_complex(values) if parameter.is_complex() else values).to(parameter.dtype))
    return found

def step(model, gradients):
    model.zero_grad()
    model(gradients).backward()
    return [parameter.grad.clone() for parameter in model.module.own]

errors = {}
for name in CATALOGUE:
    codec, model = EXACT.get(name, name), hooked(EXACT.get(name, name), *MIXED)
    averaged = "sign" not in name and name not in ("ternary", "strom")
    for number in range(4):
        signs = drawn(model, number, True)
        share = 1 + 2 * rank if averaged else 1  # the mean of 1 and 3 is 2
        for got, sign in zip(step(model, [sign * share for sign in signs]), signs):
            error = (got - sign * (2 if averaged else 1)).abs().max().item() if got.numel() else 0.0
            key = f"{name} {str(got.dtype).removeprefix('torch.')}"
            errors[key] = max(errors.get(key, 0.0), error, float(got.dtype != sign.dtype))

plain, same = [], []
for codec in (None, "fp32"):
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = hooked(codec, *MIXED, **options)
        found = [step(model, drawn(model, 10 * number + rank, False)) for number in range(4)]
        (same if codec else plain).append([each for gradients in found for each in gradients])
whole = [torch.equal(one, other) for a, b in zip(plain, same) for one, other in zip(a, b)]

class Sparse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(6, 3, sparse=True), torch.nn.Linear(3, 2)

    def forward(self, rows):
        return self.linear(self.embedding(rows)).sum()

sparse = []
for codec in (None, "fp32", "top-k:share=1"):
    torch.manual_seed(0)
    model, hook = DistributedDataParallel(Sparse()), dure.hook(codec) if codec else None
    if hook:
        model.register_comm_hook(None, hook)
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor([rank, rank + 1])).backward()
    sparse.append([parameter.grad.to_dense() for parameter in model.parameters()])
sparse = [all(map(torch.equal, each, sparse[0])) for each in sparse[1:]]

refused = ""
try:  # DDP itself cannot send these types at its start
    step(hooked("int8", torch.float8_e5m2, init_sync=False), [torch.ones(5, 37), torch.ones(9)])
except dure.DureError as error:
    refused = str(error)
if rank == 0:
    print(json.dumps({"errors": errors, "whole": all(whole), "compared": len(whole), "sparse": sparse,
                      "refused": refused}), flush=True)
"""


@pytest.mark.long
def test_gradients_of_every_type_are_exchanged_or_refused(pair):
    """All types in one model. Gradients are plus or minus a number, of which no codec loses anything."""
    found = pair["dtypes all"]
    types = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
    assert set(found["errors"]) == {f"{codec} {dtype}" for codec in CATALOGUE for dtype in types}
    assert {case: error for case, error in found["errors"].items() if error > 1e-6} == {}
    assert found["sparse"] == [True, True]
    assert found["refused"].startswith("the gradients of the parameters of shape (5, 37), (9,) are torch.float8_e5m2")


@pytest.mark.long
def test_fp32_is_what_distributed_data_parallel_does_bit_for_bit(pair):
    assert pair["dtypes all"]["whole"]
    assert pair["dtypes all"]["compared"] == 3 * 4 * 14


UNCALLED = """
import json, logging, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dure

warnings, log = [], logging.getLogger("dure")
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
log.addHandler(handler)
alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

def trained(register=False, step=True, group=None, raising=False):
    net, hook = torch.nn.Linear(4, 1), dure.hook(sys.argv[1], group)
    model = DistributedDataParallel(net, process_group=group)
    if register:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        if step:
            optimizer.step()
    if raising:
        sys.last_value = OverflowError()

def count(**case):
    del warnings[:]
    trained(**case)
    vars(sys).pop("last_value", None)
    return list(warnings)

found = {"forgotten": count(), "registered": count(register=True), "evaluated": count(step=False),
         "alone": count(group=alone), "raised": count(raising=True)}
if dist.get_rank() == 0:
    print(json.dumps(found), flush=True)
"""


def test_a_hook_that_was_never_called_is_warned_of(pair):
    found = pair["uncalled sign+momentum"]
    (warning,) = found.pop("forgotten")
    assert warning.startswith('dure.hook("sign:zeros=positive+momentum:beta=0.9") was never called, so the gradients')
    assert found == {"registered": [], "evaluated": [], "alone": [], "raised": []}


SCRIPTS = {
    "train": TRAIN, "restart": RESTART, "hard": HARD, "overflow": OVERFLOW, "columns": COLUMNS, "early": EARLY,
    "dtypes": DTYPES, "uncalled": UNCALLED,
}  # fmt: skip


def test_a_hook_is_made_without_ranks_and_names_of_codecs_are_checked_at_once():
    assert dure.hook("sign").codec is not None
    with raising(StrategyError, "nothing"):
        dure.hook("nothing")
    with raising(StrategyError, "coding", "planes"):
        dure.hook(Ternary(coding="huffman"))
