"""What codecs take in virtual time: exactly what the cluster says, wherever a method encodes or decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.wording import raising

import dure
from dure.codec import CATALOGUE
from dure.codec.cost import cost_of
from dure.codec.feedback import Momentum
from dure.codec.one_bit import OneBit
from dure.codec.sign import Sign
from dure.core.catalogue import load
from dure.core.cost import CodecCost, Line
from dure.core.node import CodecWork
from dure.errors import UsageError
from dure.runtime.virtual.cluster import Cluster, Machines
from dure.runtime.virtual.compute import Constant

K, STEPS = 4, 3
SLOW = CodecCost(encode=Line(start=1.0), decode=Line(start=10.0), combine=Line(start=100.0))
FREE = CodecCost()


def cluster(codec: str, cost: CodecCost, speed: float = 1.0) -> Cluster:
    kind = Machines(count=K, compute=Constant(seconds=1e-3), speed=speed)
    return Cluster(machines=(kind,), codecs={codec: cost})


def run(strategy: str, on: Cluster) -> dict[str, object]:
    return dict(dure.train("digits-mlp", strategy=strategy, on=on, steps=STEPS, lr=0.01).summary())


STEP = {
    "bsp collective fp16": ("fp16", K * 1 + (K * 100 + 1) + K * 10),  # a mean is encoded again
    "bsp collective sign+momentum": ("sign+momentum", K * 1 + 100 + K * 10),  # a vote is
    "bsp collective strom:threshold=0.1": ("strom", 1 + K * 100),
    "bsp ps sign": ("sign", 1 + K * 10 + 100 + 10 + 10),  # a vote; its verdict decoded at the server, then at workers
    "bsp ps:shards=2 1bit": ("1bit", 2 * 1 + K * 10),  # shards decode one after another, beside each other
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STEP)
def test_a_step_takes_what_its_coders_take(strategy: str) -> None:
    codec, seconds = STEP[strategy]
    slow, free = run(strategy, cluster(codec, SLOW)), run(strategy, cluster(codec, FREE))
    assert slow["seconds"] == pytest.approx(STEPS * seconds, rel=2e-3)
    assert slow["params_sha256"] == free["params_sha256"]
    assert slow["bytes_sent"] == free["bytes_sent"]
    assert slow["payoff"]["coding"] == pytest.approx(seconds)  # type: ignore[index]


def test_values_count_and_slow_machines_take_longer() -> None:
    numel = 64 * 64 + 64 + 64 * 10 + 10
    cost = CodecCost(encode=Line(value=1.0))
    taken = run("bsp ps 1bit", cluster("1bit", cost, speed=0.5))["seconds"]
    assert taken == pytest.approx(STEPS * 2 * numel, rel=1e-3)


def test_a_cost_is_that_of_all_calls() -> None:
    cost = CodecCost(encode=Line(start=1.0, value=0.5), decode=Line(value=2.0))
    assert (
        cost.seconds([CodecWork("encode", 4, 3), CodecWork("decode", 5), CodecWork("combine", 9)]) == 3 * (1 + 2) + 10
    )


def test_the_cluster_file_precedes_the_statement_for_the_same_name() -> None:
    own = CodecCost(encode=Line(start=1.0))
    assert cost_of("sign", {"sign": own}, Sign.cost) is own
    assert cost_of("sign", {}, Sign.cost) is Sign.cost
    assert cost_of("sign+momentum", {"sign": own}, Sign.cost) is Momentum.costs["sign"]
    assert cost_of("sign+momentum", {"sign+momentum": own}, Sign.cost) is own
    assert cost_of("1bit+momentum", {"1bit": own}, OneBit.cost) is own
    assert cost_of("1bit+momentum", {}, OneBit.cost) is OneBit.cost


MINE = """
from dataclasses import dataclass
from typing import ClassVar

from dure import Int8
from dure.core.catalogue import load
from dure.core.cost import CodecCost, Line

@dataclass(frozen=True, slots=True)
class Mine(Int8):
    cost: ClassVar[CodecCost] = CodecCost(encode=Line(start=1.0))
"""


def test_a_codec_in_a_file_costs_what_its_class_or_the_cluster_states(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    mine = f"{tmp_path / 'mine.py'}:Mine"
    assert run(f"bsp ps {mine}", cluster("1bit", CodecCost()))["seconds"] == pytest.approx(STEPS * 1.0, rel=0.1)
    measured = CodecCost(encode=Line(start=3.0))
    assert run(f"bsp ps {mine}", cluster(mine, measured))["seconds"] == pytest.approx(STEPS * 3.0, rel=0.1)
    assert run("bsp ps", cluster(mine, measured))["seconds"] < STEPS * 0.1  # a file that names it serves other runs


def test_every_codec_states_its_cost() -> None:
    assert {name for name, place in CATALOGUE.items() if load(place).cost == CodecCost()} == {"fp32"}


def test_a_cluster_file_s_codecs_are_codecs() -> None:
    assert Cluster(**cluster("1bit", SLOW).model_dump(mode="json")) == cluster("1bit", SLOW)
    for wrong in ("1bitt", "momentum+sign"):
        with raising(UsageError):
            run("bsp", cluster(wrong, SLOW))
