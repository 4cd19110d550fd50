"""Answers of a plan that a practitioner accepts, on clusters of named devices."""

import pytest

from dure.errors import UsageError
from dure.job.job import load_job
from dure.planner.candidates import ONE, PLAIN, Scene
from dure.planner.ranking import in_order, ranked
from dure.planner.search import search
from dure.planner.side_by_side import Deadline
from dure.planner.timing import timed
from dure.run.step_shape import referred
from dure.runtime.virtual.cluster import Cluster

HIERARCHICAL = f"{PLAIN} collective:algorithm=hierarchical"
BITS = (f"{PLAIN} 1bit", f"{PLAIN} top-k")

VGG_ONE = 1531.9
"""Images in a second of VGG-16 on 8 V100 of one host; 16 of two hosts made 546.9 (horovod issue 2581)."""


def scene(text, on):
    job = load_job(text)
    cluster = Cluster.described(on) if isinstance(on, str) else Cluster(**on)
    cluster = referred(cluster, job)
    return Scene(job, cluster, job.batch_size * cluster.workers, has_values=False)


def seconds(here, *strategies):
    return [timed(here, each).seconds for each in strategies]


def order(here, *strategies):
    return [row.strategy for row in in_order([ranked(each, timed(here, each), here) for each in strategies])]


def answer(here):
    found = search(here, Deadline(30))
    assert len(found.rows) > 2
    return found.rows[0].strategy


def over_tcp(rate, **kind):
    machines = [{"count": 2, "gpus": 8, "gpu": "v100-sxm2-16gb", "card": {"transport": "tcp"}, **kind}]
    return {"machines": machines, "link": {"bandwidth": rate}}


@pytest.mark.long
@pytest.mark.parametrize("job", ["resnet50:batch=64", "bert-base:batch=32"])
def test_plain_data_parallelism_is_the_answer_on_a_host_with_a_switch(job):
    assert answer(scene(job, "1x8 a100-sxm4-80gb")) == PLAIN


@pytest.mark.parametrize(
    ("job", "on"),
    [
        ("vgg16:batch=32", "2x8 v100-sxm2-16gb @ 10 Gbit/s"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                ("bert-base:batch=32", "4x8 v100-sxm2-16gb @ 10 Gbit/s"),
                ("resnet50:batch=64", "4x8 v100-sxm2-16gb @ 10 Gbit/s"),
                ("resnet101:batch=64", "16x1 v100-pcie-16gb @ 10 Gbit/s"),
                ("resnet50:batch=64", "4x8 v100-sxm2-16gb @ 25 Gbit/s"),
                ("bert-large:batch=16,precision=fp16", "4x8 v100-sxm2-16gb @ 100 Gbit/s"),
                ("resnet50:batch=64", "4x8 a100-sxm4-80gb @ 200 Gbit/s"),
            ]
        ),
    ],
)
def test_bits_and_sparse_messages_are_not_ahead_of_plain_data_parallelism(job, on):
    """In more than 200 settings of a data center, compression was faster in 6 (Agarwal et al., MLSys 2022)."""
    found = order(scene(job, on), ONE, PLAIN, HIERARCHICAL, *BITS)
    assert set(found[:2]) <= {ONE, PLAIN, HIERARCHICAL}


def test_a_second_host_behind_a_slow_network_only_slows_vgg():
    here = scene("vgg16:batch=32", over_tcp("10 Gbit/s", compute={"seconds": 8 * 32 / VGG_ONE}))
    assert order(here, ONE, PLAIN, HIERARCHICAL)[0] == ONE
    alone, both = seconds(here, ONE, PLAIN)
    assert 0.2 < alone / both < 0.5  # 0.36 was measured


@pytest.mark.long
def test_one_host_is_the_answer_for_vgg_behind_a_slow_network():
    here = scene("vgg16:batch=32", over_tcp("10 Gbit/s", compute={"seconds": 8 * 32 / VGG_ONE}))
    assert answer(here) == ONE


@pytest.mark.long
@pytest.mark.parametrize(("precision", "most"), [("fp32", 3.5), ("fp16", 6.0)])
def test_one_host_is_the_answer_for_gpt_2_in_small_batches_over_tcp(precision, most):
    """An epoch took 2.9 times as long on two hosts (transformers issue 3707). Batch and precision are not stated."""
    here = scene(f"transformer:batch=1,precision={precision}", over_tcp("25 Gbit/s"))
    alone, both = seconds(here, ONE, PLAIN)
    assert 2.2 < both / alone < most
    assert answer(here) == ONE


@pytest.mark.parametrize(("hosts", "least", "most"), [(1, 1.0, 1.0), (2, 1.1, 1.5), (4, 1.5, 2.6)])
def test_shards_by_memory_are_faster_than_by_layer_for_vgg(hosts, least, most):
    """Hosts of two workers, each with a host of a server: 1.20 was measured on two, 1.66 on four."""
    machines = [{"count": hosts, "gpus": 2, "gpu": "rtx-2080-ti"}]
    here = scene("vgg16:batch=32", {"machines": machines, "link": {"bandwidth": "10 Gbit/s"}})
    memory, layer = seconds(here, f"bsp ps:shards={hosts}", f"bsp ps:shards={hosts},split=layer")
    assert least <= layer / memory <= most


@pytest.mark.parametrize(
    ("job", "on", "best"),
    [
        ("vgg16:batch=64", "4x8 v100-sxm2-16gb @ 25 Gbit/s", PLAIN),
        ("vgg16:batch=32", "2x8 v100-sxm2-16gb @ 10 Gbit/s", HIERARCHICAL),
        ("vgg16:batch=32", "8x4 v100-pcie-16gb @ 100 Gbit/s", PLAIN),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                ("bert-base:batch=32", "4x8 v100-sxm2-16gb @ 25 Gbit/s", HIERARCHICAL),
                ("resnet50:batch=64", "4x8 a100-sxm4-80gb @ 200 Gbit/s", PLAIN),
            ]
        ),
    ],
)
def test_two_levels_are_the_answer_where_they_are_faster_than_the_ring(job, on, best):
    here = scene(job, on)
    assert order(here, PLAIN, HIERARCHICAL)[0] == best
    inside = here.cluster.machines[0]
    ring, levels = seconds(here, PLAIN, HIERARCHICAL)
    assert (levels < ring) == (inside.gpu != "v100-pcie-16gb")  # PCIe is no faster than 8 cards of a ring


LLAMA = "transformer:hidden=4096,heads=32,ffn=11008,vocab=32000,form=llama,sequence=2048,optimizer=adamw"
"""7 billion parameters in 32 layers, 1 billion in 4."""


@pytest.mark.parametrize(
    ("layers", "on", "memory"),
    [(4, "1x8 v100-sxm2-16gb", 17e9), pytest.param(32, "1x8 a100-sxm4-80gb", 86e9, marks=pytest.mark.long)],
)
def test_a_large_model_is_sharded_where_it_does_not_fit_whole(layers, on, memory):
    """16 bytes a parameter of weights, gradient and state of the optimizer: 17 and 108 GB."""
    here = scene(f"{LLAMA},layers={layers},precision=fp32,batch=1,recompute=true", on)
    with pytest.raises(UsageError, match=r"Shard it, as in --partition zero:stage=3, split the model"):
        timed(here, PLAIN)
    some, all_of_it = (timed(here, f"bsp zero:stage={stage}") for stage in (2, 3))
    assert all_of_it.memory.total < some.memory.total < memory
    assert all_of_it.memory.total < memory / 2
    assert all_of_it.seconds == pytest.approx(some.seconds, rel=0.1)
    assert order(here, "bsp 1f1b:stages=2,micro=2,cuts=even", "bsp zero:stage=3")[0] == "bsp zero:stage=3"


@pytest.mark.long
def test_parameters_are_sharded_inside_hosts_where_the_network_between_them_is_slow():
    here = scene(f"{LLAMA},layers=32,precision=tf32,batch=1,recompute=true", "8x8 a100-sxm4-80gb @ 100 Gbit/s")
    hosts, everywhere = "bsp zero:stage=3,within=host", "bsp zero:stage=3"
    found = order(here, hosts, everywhere, "bsp zero:stage=1,within=host", "bsp tensor:ways=8+zero:stage=3")
    assert found[0] == hosts
    inside, flat = seconds(here, hosts, everywhere)
    assert inside < 0.8 * flat


def test_a_small_model_is_not_sharded_for_speed():
    """125 million parameters."""
    here = scene("transformer:optimizer=adamw,precision=bf16,batch=8", "1x8 a100-sxm4-80gb")
    assert order(here, PLAIN, "bsp zero:stage=1", "bsp zero:stage=3") == [PLAIN, "bsp zero:stage=1", "bsp zero:stage=3"]


WIDE = "transformer:layers=4,hidden=4096,heads=32,vocab=32000,form=llama,precision=bf16,sequence=2048,batch=1"


@pytest.mark.long
def test_layers_are_split_inside_hosts_and_pipelines_go_between_them():
    """Of 8 hosts of H100, 16 stages kept 0.86 of the rate of 8, and layers split 16 ways 0.57 of that of 8 ways."""
    machines = {"count": 2, "gpus": 8, "gpu": "h100-sxm5-80gb"}
    link = {"bandwidth": "400 Gbit/s"}
    here = scene(WIDE, {"machines": [machines], "link": link})
    joined, split = seconds(here, "bsp 1f1b:stages=2,micro=16,cuts=profile+tensor:ways=8", "bsp tensor:ways=16")
    assert joined < 0.57 / 0.86 * split
    small = scene(WIDE, {"machines": [machines | {"memory": "4 GB"}], "link": link})
    best = search(small, Deadline(40)).rows[0].strategy
    assert "stages=" in best
    assert best.endswith(("+tensor:ways=2", "+tensor:ways=4", "+tensor:ways=8"))  # inside a host of 8
