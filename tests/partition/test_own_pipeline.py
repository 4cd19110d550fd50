"""A user's own pipeline, in a file: it runs, and a wrong order is refused before anything starts."""

from pathlib import Path

import pytest
import torch
from support.chains import CUTS, chain, play
from support.runs import resolved, virtual
from support.wording import raising

from dure.errors import DeadlockError, StrategyError

EAGER = Path(__file__).parents[2] / "examples" / "10_eager_1f1b.py"
OWN = """
from dataclasses import dataclass
from dure.partition.orders import Action
from dure.partition.pipeline import Pipeline

@dataclass(frozen=True)
class OneByOne(Pipeline):
    '''No pipelining at all.'''

    def order(self, rank, batches):
        for batch in batches:
            yield Action("F", batch)
            yield Action("B", batch)
            yield Action("U", batch)


@dataclass(frozen=True)
class Crossed(OneByOne):
    '''The first worker waits for a backward of the second, which waits for a forward of the first.'''

    def order(self, rank, batches):
        actions = list(super().order(rank, batches))
        if rank == 1:
            actions = [*(each for each in actions if each.kind == "F"), *(each for each in actions if each.kind != "F")]
        return iter(actions)


@dataclass(frozen=True)
class Forgetful(OneByOne):
    '''An update is missing.'''

    def order(self, rank, batches):
        return (each for each in super().order(rank, batches) if each.kind != "U" or each.batch != 1)


@dataclass(frozen=True)
class FromZero(OneByOne):
    '''It counts the mini-batches from 0 after a drain too.'''

    def order(self, rank, batches):
        return super().order(rank, range(len(batches)))


@dataclass(frozen=True)
class Foreign(OneByOne):
    '''It has an action of no kind.'''

    def order(self, rank, batches):
        return (Action("X", each.batch) if each.kind == "F" else each for each in super().order(rank, batches))


@dataclass(frozen=True)
class Worded(OneByOne):
    '''It has texts in place of actions.'''

    def order(self, rank, batches):
        return (str(each) for each in super().order(rank, batches))


@dataclass(frozen=True)
class Counted(OneByOne):
    '''It has a number in place of actions.'''

    def order(self, rank, batches):
        return len(batches)


@dataclass(frozen=True)
class Orderless(Pipeline):
    '''It has no order.'''
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return lambda name: {"partition": f"{path}:{name}:stages=2,{CUTS[2]}", "workers": 2}


def test_a_pipeline_in_a_file_runs(own):
    run = virtual(chain(), "bsp", None, steps=9, dtype="float64", **own("OneByOne"))
    assert torch.allclose(run.params, play("gpipe:micro=1", 2).params, rtol=0, atol=1e-14)


def test_a_pipeline_of_an_example_is_1f1b_to_the_last_bit():
    options = {"workers": 2, "steps": 9, "dtype": "float64"}
    eager = virtual(chain(), f"bsp {EAGER}:Eager:stages=2,micro=3,{CUTS[2]}", None, **options)
    assert torch.equal(eager.params, virtual(chain(), f"bsp 1f1b:stages=2,micro=3,{CUTS[2]}", None, **options).params)


def test_an_order_that_yields_no_actions_is_refused(own):
    with pytest.raises(StrategyError, match=r"Worded\.order must yield dure.Action, got 'F0'"):
        resolved(chain(), "bsp", on="virtual", **own("Worded"))
    with pytest.raises(StrategyError, match=r"Counted\.order must yield dure.Action, got "):
        resolved(chain(), "bsp", on="virtual", **own("Counted"))


def test_a_pipeline_without_an_order_is_refused(own):
    with pytest.raises(StrategyError, match=r"own\.py:Orderless has no `order`: define it"):
        resolved(chain(), "bsp", on="virtual", **own("Orderless"))


def test_a_deadlock_is_refused_before_the_run_and_names_its_actions(own):
    waits = "worker 0 waits at B0 for worker 1's B0; worker 1 waits at F1 for worker 0's F1"
    with pytest.raises(DeadlockError, match=waits):
        resolved(chain(), "bsp", on="virtual", **own("Crossed"))


def test_an_order_without_an_update_is_refused(own):
    with raising(StrategyError, "worker 0"):
        resolved(chain(), "bsp", on="virtual", **own("Forgetful"))


def test_an_order_that_is_wrong_after_a_drain_is_refused_where_checkpoints_drain(own, tmp_path):
    assert virtual(chain(), "bsp", None, steps=9, dtype="float64", **own("FromZero")).params.isfinite().all()
    with raising(StrategyError, "worker 0"):
        resolved(chain(), "bsp", None, steps=9, on="virtual", out=tmp_path, checkpoint_every=3, **own("FromZero"))


def test_an_action_of_no_kind_is_refused(own):
    with raising(StrategyError, "X"):
        resolved(chain(), "bsp", None, steps=9, on="virtual", **own("Foreign"))
