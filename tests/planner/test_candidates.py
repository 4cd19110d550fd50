"""Candidates of a plan: every member of a catalogue is one, or is left out with a reason."""

import dataclasses

import pytest

from dure import codec, partition, sync, topology
from dure.job.job import load_job
from dure.partition.mesh import parts_of, pipeline_of
from dure.planner.candidates import (
    LEFT_OUT,
    Scene,
    Shape,
    crossed,
    on_servers,
    plain,
    roomy,
    shape_of,
    sharded,
    sharded_more,
    single,
    wide,
)
from dure.run.strategy import Strategy, parse_members
from dure.runtime.virtual.cluster import Cluster, Machines

EIGHT = Shape(workers=8, per_machine=1, one_host=False, blocks=4, batch=512, has_rows=True)
HOST = Shape(workers=8, per_machine=8, one_host=True, blocks=4, batch=512, has_rows=True)


def everything(shape):
    return [*single(shape), *on_servers("ps", "ps:shards=4", shape), *wide(shape), *roomy(shape)]


def names(strategies):
    return {part.name for text in strategies for member in text.split() for part in parse_members(member)}


def test_every_member_is_a_candidate_or_is_left_out_with_a_reason():
    members = {*sync.CATALOGUE, *topology.CATALOGUE, *codec.CATALOGUE, *partition.CATALOGUE}
    proposed = names([*everything(EIGHT), *everything(HOST)])
    implied = {"shared", "gossip"}  # the topologies of hogwild and ad-psgd
    assert members - proposed - set(LEFT_OUT) == implied
    assert not proposed & set(LEFT_OUT)


@pytest.mark.parametrize("shape", [EIGHT, HOST], ids=["machines", "host"])
def test_every_candidate_is_the_text_of_a_strategy(shape):
    for text in everything(shape):
        chosen = Strategy.parse(text)
        assert Strategy.parse(str(chosen)) == chosen, text


def test_plain_data_parallelism_is_the_first_candidate_and_the_only_one_of_a_single_worker():
    assert next(single(EIGHT)) == "bsp"
    assert list(single(Shape(1, 1, one_host=True, blocks=4, batch=64, has_rows=False))) == ["bsp"]


def test_layers_are_split_over_machines_in_pipelines_only_if_nothing_else_fits():
    joined = {text for text in single(EIGHT) if "+tensor" in text}
    assert joined == set()
    assert all("+tensor" in text or ("tensor:ways=" in text and "+zero:" in text) for text in wide(EIGHT))
    assert {text for text in single(HOST) if "+tensor" in text}


def test_where_a_model_has_no_room_parameters_are_sharded_or_layers_split_inside_machines():
    four = Shape(workers=32, per_machine=8, one_host=False, blocks=10, batch=32, has_rows=False)
    first, *found = roomy(four)
    assert [first, *found[:2]] == ["bsp zero:stage=3", "bsp zero:stage=3,within=host", "bsp tensor:ways=8+zero:stage=3"]
    assert found[2] == "bsp 1f1b:stages=4,micro=32,cuts=profile,remat=true+tensor:ways=8"
    assert [text.partition("remat")[1] for text in found[2:]] == ["remat", "remat", "", ""]
    assert list(roomy(EIGHT)) == ["bsp zero:stage=3"]


def test_sharded_data_parallelism_is_next_to_plain_and_is_inside_hosts_where_several_have_several_workers():
    hosts = Shape(workers=32, per_machine=8, one_host=False, blocks=10, batch=32, has_rows=False)
    texts = [f"bsp zero:stage={stage}{within}" for stage in (1, 3) for within in ("", ",within=host")]
    assert list(single(hosts))[1:5] == texts
    for shape in (EIGHT, HOST):
        assert [text for text in single(shape) if "zero:" in text] == ["bsp zero:stage=1", "bsp zero:stage=3"]
    one_block = dataclasses.replace(hosts, blocks=1)
    assert [text for text in single(one_block) if "stage=3" in text] == []
    assert list(sharded(dataclasses.replace(hosts, workers=1, per_machine=1))) == []


def test_what_has_no_room_is_proposed_with_more_of_its_memory_sharded():
    refused = {
        "bsp": [],
        "averaging:period=4": [],
        "bsp zero:stage=1,within=host": ["bsp zero:stage=2,within=host"],
        "bsp zero:stage=3": [],
        "bsp 1f1b:stages=2,micro=4": ["bsp 1f1b:stages=2,micro=4+zero:stage=1"],
        "bsp 1f1b:stages=2,micro=4+tensor:ways=2": ["bsp 1f1b:stages=2,micro=4+tensor:ways=2+zero:stage=1"],
        "bsp 1f1b:stages=2,micro=4+zero:stage=1": [],
        "bsp tensor:ways=4": ["bsp tensor:ways=4+zero:stage=1", "bsp tensor:ways=4+zero:stage=3"],
        "bsp pipedream:stages=2": [],
        "averaging:period=4 1f1b:stages=2,micro=4": [],
    }
    for text, more in refused.items():
        assert list(sharded_more([text])) == more, text
    everywhere = [each for more in refused.values() for each in more]
    assert list(sharded_more([*refused])) == everywhere
    for text in everywhere:
        assert Strategy.parse(text)


def test_the_all_reduces_of_an_engine_of_accelerators_are_the_first_candidates():
    hosts = Shape(workers=16, per_machine=8, one_host=False, blocks=4, batch=64, has_rows=False, accelerated=True)
    assert list(plain(hosts)) == list(single(hosts))[:2] == ["bsp", "bsp collective:algorithm=hierarchical"]
    assert list(plain(EIGHT)) == ["bsp"]


def test_crossed_candidates_join_the_best_of_each_axis():
    found = list(crossed(["bsp 1f1b:stages=2,micro=4"], ["ssp:bound=3 ps"], ["bsp int8"]))
    assert found == ["ssp:bound=3 ps 1f1b:stages=2,micro=4", "ssp:bound=3 ps int8"]


def test_the_shape_counts_workers_of_a_machine_and_blocks_with_parameters():
    cluster = Cluster(machines=(Machines(count=2, workers=4),))
    shape = shape_of(Scene(load_job("digits-mlp"), cluster, 64))
    assert (shape.workers, shape.per_machine, shape.one_host, shape.batch) == (8, 4, False, 64)
    module = load_job("digits-mlp").build(0)
    assert shape.blocks == sum(any(True for _ in child.parameters()) for child in module.children())


def test_a_pipeline_never_has_more_micro_batches_than_samples():
    few = Shape(workers=8, per_machine=1, one_host=False, blocks=8, batch=8, has_rows=False)
    pipelines = [text for text in everything(few) if "micro=" in text]
    assert pipelines
    for text in pipelines:
        chosen = Strategy.parse(text).partition
        copies = few.workers // parts_of(chosen)
        assert pipeline_of(chosen).micro_batches <= few.batch // copies, text


def test_the_codec_of_gradients_is_not_joined_to_methods_that_send_models():
    found = list(crossed([], ["diloco:period=30", "downpour ps"], ["bsp strom", "bsp fp16"]))
    assert found == ["diloco:period=30 fp16", "downpour ps strom", "downpour ps fp16"]
