"""Jobs of stated seconds: files in YAML and graphs of PipeDream's profiler, and the seconds that their runs take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.runs import virtual
from support.wording import raising
from torch import nn

import dure
from dure.errors import UsageError
from dure.job.job import Job, load_job
from dure.job.stated import SPEED
from dure.partition.borders import measure
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import Constant

BLOCKS = """
batch_size: 8
input_nbytes: 64 kB
blocks:
- {name: conv, forward: 20 ms, backward: 45 ms, parameter_nbytes: 2 MB, output_nbytes: 800 kB}
- {name: pool, forward: 1 ms, backward: 1 ms, output_nbytes: 80 kB, activation_nbytes: 1 MB}
- {name: dense.1, forward: 1 ms, backward: 2 ms, parameters: [64 MB, 16 kB], output_nbytes: 32 kB}
"""


def line(node: str, forward: float, backward: float, activation: str, parameter: float = 0.0) -> str:
    times = f"forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}"
    return f"{node} -- {times}, activation_size={activation}, parameter_size={parameter:.3f}"


BRANCH = "\n".join(
    (
        line("node7 -- Linear(in_features=8, out_features=4, bias=True)", 0.5, 1.5, "256.000", 144.0),
        line("node1 -- Input0", 30.0, 0.0, "1024.000"),
        line("node2 -- Conv2d(3, 8, kernel_size=(3, 3))", 4.0, 9.0, "4096.000", 864.0),
        line("node10 -- ReLU(inplace)", 1.0, 1.25, "4096.000"),
        line("node4 -- LSTM(8, 8)", 2.0, 3.0, "[1024.0; 512.0; 512.0]", 2048.0),
        line("node5 -- Add(inplace)", 0.0, 0.0, "4096.000") + " -- stage_id=1",
        "\tnode1 -- node2",
        "\tnode2 -- node10",
        "\tnode2 -- node4",
        "\tnode10 -- node5",
        "\tnode4 -- node5",
        "\tnode5 -- node7",
    )
)
"""node2 is read by node4 and node10, which node5 joins: 4096 bytes of node2 cross the border behind node4."""


def written(folder: Path, text: str, name: str = "stated.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def machines(count: int) -> Cluster:
    return Cluster.uniform(count, compute=Constant(overhead=0.0))


def parameters(module: nn.Module) -> list[int]:
    return [each.numel() * each.element_size() for each in module.parameters()]


def kept_and_borders(job: Job) -> tuple[list[int], list[int]]:
    """The bytes that each block keeps, and those of its outputs, for a mini-batch."""
    blocks = list(job.build())
    inputs, _ = job.train.batch(torch.arange(job.batch_size))
    found = measure(blocks, lambda block, value: block(value), inputs)
    borders = [found.border(number).nbytes for number in range(1, len(blocks) + 1)]
    return [sum(cost.kept.values()) for cost in found.costs], borders


def test_blocks_have_the_stated_sizes(tmp_path: Path) -> None:
    job = load_job(written(tmp_path, BLOCKS))
    assert (job.name, job.batch_size) == ("stated", 8)
    assert parameters(job.build()) == [2_000_000, 64_000_000, 16_000]
    assert [name for name, _ in job.build().named_children()] == ["0-conv", "1-pool", "2-dense_1"]
    assert job.train.batch(torch.arange(8))[0].nbytes == 64_000
    assert kept_and_borders(job) == ([800_000, 1_000_000, 32_000], [800_000, 80_000, 32_000])


def test_a_machine_of_the_default_speed_takes_the_stated_seconds(tmp_path: Path) -> None:
    assert Constant().flops_per_second == SPEED
    name = written(tmp_path, BLOCKS)
    assert virtual(name, "bsp", machines(1), steps=3, timing_only=True).seconds == pytest.approx(3 * 0.070)
    halved = Cluster.uniform(1, compute=Constant(overhead=0.0, flops_per_second=2 * SPEED))
    assert virtual(name, "bsp", halved, steps=3, batch_size=4, timing_only=True).seconds == pytest.approx(3 * 0.0175)


def test_a_first_block_without_parameters_has_its_backward_too(tmp_path: Path) -> None:
    first, second, third, *rest = BLOCKS.strip().split("\n- ")
    job = load_job(written(tmp_path, "\n- ".join([first, third, second, *rest])))
    assert job.flops_per_sample * 8 == pytest.approx(0.070 * SPEED)


def test_a_graph_is_in_topological_order_without_its_input(tmp_path: Path) -> None:
    job = load_job(f"{written(tmp_path, BRANCH, 'graph.txt')}:samples=4")
    assert (job.name, job.batch_size) == ("graph", 4)
    assert job.block_seconds == [(0.004, 0.009), (0.002, 0.003), (0.001, 0.00125), (0.0, 0.0), (0.0005, 0.0015)]
    assert [sum(parameters(block)) for block in job.build()] == [864, 2048, 0, 0, 144]
    kept, borders = kept_and_borders(job)
    assert kept == [4096, 2048, 4096, 4096, 256]
    assert borders == [4096, 4096 + 2048, 2048 + 4096, 4096, 256]
    assert load_job(written(tmp_path, BRANCH, "graph.txt")).batch_size == 128


@pytest.mark.parametrize(
    "strategy",
    ["bsp", "bsp ps:shards=2", "downpour ps:colocated=true", "bsp 1f1b:stages=2,micro=2,cuts=profile"],
)
def test_axes_that_need_no_values_work(tmp_path: Path, strategy: str) -> None:
    run = virtual(written(tmp_path, BRANCH, "graph.txt"), strategy, machines(4), steps=2, timing_only=True)
    assert run.seconds > 2 * 0.01


def test_a_run_with_gradients_says_that_there_are_no_values(tmp_path: Path) -> None:
    with raising(UsageError, "stated", "--timing-only"):
        dure.train(written(tmp_path, BLOCKS), on="virtual", workers=2, steps=1)


@pytest.mark.long
def test_a_plan_of_stated_seconds(tmp_path: Path) -> None:
    found = dure.plan(written(tmp_path, BLOCKS), on=machines(4), within=4)
    plain = next(row for row in found.rows if row.strategy == "bsp")
    assert plain.timing.seconds > 0.070


def changed(old: str, new: str) -> str:
    assert old in BLOCKS
    return BLOCKS.replace(old, new)


FILES = {
    "a list": ("- 3", "a job is a mapping"),
    "no YAML": ("batch_size: [", "it is no YAML"),
    "no samples": (changed("batch_size: 8", "batch_size: 0"), "batch_size: 0"),
    "an unknown key": (changed("batch_size: 8", "samples: 8"), "samples"),
    "no inputs": (changed("input_nbytes: 64 kB\n", ""), "input_nbytes"),
    "an unknown unit of time": (changed("forward: 20 ms", "forward: 20 m"), "blocks[0].forward: '20 m'"),
    "no backward": (changed("backward: 2 ms, ", ""), "blocks[2].backward"),
    "an unknown unit of size": (changed("80 kB", "80 XB"), "blocks[1].output_nbytes: '80 XB'"),
    "parts of values": (changed("2 MB", "7 B"), "blocks[0].parameter_nbytes: 7"),
    "parts of values in a list": (changed("16 kB", "7 B"), "blocks[2].parameters: 7"),
    "parameters twice": (changed("[64 MB, 16 kB]", "[64 MB], parameter_nbytes: 4 B"), "blocks[2].parameters"),
    "an unknown key of a block": (changed("activation_nbytes", "activations"), "blocks[1]: unknown key 'activations'"),
    "a block that is none": ("batch_size: 8\ninput_nbytes: 4\nblocks: [5]", "blocks[0]: 5"),
    "no blocks": ("batch_size: 8\ninput_nbytes: 4\nblocks: []", "blocks"),
    "no parameters": (re.sub("parameters: .*],|parameter_nbytes: 2 MB,", "", BLOCKS), "parameters"),
    "too many seconds": (changed("45 ms", "1e12 s"), "blocks[0].backward: 1e+12"),
    "too many bytes": (changed("80 kB", "1e30 B"), "blocks[1].output_nbytes: 1e+30"),
    "too many bytes in a list": (changed("16 kB", "20 TB"), "blocks[2].parameters[1]: 2e+13"),
    "too many bytes of inputs": (changed("64 kB", "20 TB"), "input_nbytes: 2e+13"),
    "too many samples": (changed("batch_size: 8", "batch_size: 1000000000000"), "batch_size: 1000000000000"),
    "a name that is a number": (changed("name: pool", "name: 5"), "blocks[1].name: 5"),
    "nothing to do": (re.sub("backward: [0-9]* ms", "backward: 0", BLOCKS), "seconds of backward"),
}


@pytest.mark.parametrize("name", FILES)
def test_errors_of_a_file_name_the_key(tmp_path: Path, name: str) -> None:
    text, value = FILES[name]
    with raising(UsageError, "stated.yaml", value):
        load_job(written(tmp_path, text))


GRAPHS = {
    "empty": ("", "no operations"),
    "another key": (BRANCH.replace("forward_compute_time=4.000", "forward=4.0"), "line 3"),
    "no number": (BRANCH.replace("4096.000", "40.5.0"), "line 3"),
    "no sizes": (BRANCH.replace("[1024.0; 512.0; 512.0]", "[1024.0; many]"), "line 5: activation_size='[1024.0; m"),
    "parts of values": (BRANCH.replace("864.000", "863.000"), "line 3: parameter_size='863.000'"),
    "bytes below zero": (BRANCH.replace("[1024.0; 512.0;", "[1024.0; -512.0;"), "line 5: activation_size="),
    "too many seconds": (BRANCH.replace("=4.000", f"=4{'0' * 30}"), "node2: forward: 4e+27"),
    "endless seconds": (BRANCH.replace("=4.000", f"={'9' * 400}"), "node2: forward: inf"),
    "too many bytes": (BRANCH.replace("864.000", f"864{'0' * 15}"), "node2: parameter_nbytes: 8.64e+17"),
    "a long number": (BRANCH.replace("node7", f"node{'9' * 5000}"), "line 1"),
    "a node twice": (BRANCH.replace("node10 -- ReLU", "node2 -- ReLU"), "line 4: node2"),
    "an unknown node": (BRANCH + "\n\tnode7 -- node11", "line 13: there is no node11"),
    "a cycle": (BRANCH + "\n\tnode7 -- node4", "node4"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_errors_of_a_graph_name_the_line(tmp_path: Path, name: str) -> None:
    text, value = GRAPHS[name]
    with raising(UsageError, "graph.txt", value):
        load_job(written(tmp_path, text, "graph.txt"))


def test_a_file_that_is_not_there_and_a_wrong_number_of_samples(tmp_path: Path) -> None:
    for name in ("none.yaml", "none.txt"):
        with raising(UsageError, name):
            load_job(str(tmp_path / name))
    with raising(UsageError, "samples", "0"):
        load_job(f"{written(tmp_path, BRANCH, 'graph.txt')}:samples=0")
    with raising(UsageError, "samples", "1000000"):
        load_job(f"{written(tmp_path, BRANCH, 'graph.txt')}:samples=1000000")
