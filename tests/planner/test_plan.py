"""`dure plan`: its answer, its files and its errors, as a user meets them."""

import io
import json
import math
import re
import time

import pytest
import torch
from rich.console import Console
from support.plan_values import BATCH, WORKERS, plan_values, row
from support.wording import raising
from torch.nn.functional import cross_entropy

import dure
from dure.cli.main import main
from dure.cli.plan import ending, sentences, table
from dure.core.target import Target
from dure.errors import UsageError
from dure.job.job import load_job
from dure.planner import search as searching
from dure.planner import side_by_side
from dure.planner.candidates import ONE, Scene
from dure.planner.commands import Command, command_of
from dure.planner.explain import bottlenecks, unstated, why, would_change, written_from_sends
from dure.planner.learning import learned
from dure.planner.options import PlanOptions
from dure.planner.plan import LARGE, plan, scene_of
from dure.planner.ranking import ranked, with_target
from dure.planner.search import Found
from dure.planner.side_by_side import Deadline
from dure.planner.sweeps import Sweep, of_workers, sweeps, with_bandwidth, with_equal_workers, without_limits
from dure.planner.timing import largest_memory, setup_in, timed
from dure.report.labels import seconds_text
from dure.run.config import TrainConfig
from dure.run.step_shape import referred
from dure.runtime.virtual.cluster import Cluster, Link, Machines, SharedHost
from dure.runtime.virtual.compute import Constant
from dure.runtime.virtual.fabric import Racks, Site, SiteLine
from dure_jobs.mnist import convnet

FAST = Constant(flops_per_second=1e9, overhead=1e-3)


def cluster(count=4, bandwidth=1e9, **machine):
    kinds = (Machines(count=count, compute=FAST, **machine),)
    return Cluster(machines=kinds, link=Link(bandwidth=bandwidth, latency=1e-4))


@pytest.mark.long
def test_plain_data_parallelism_is_the_answer_on_a_fast_network_with_a_script(tmp_path, capsys):
    file = tmp_path / "fast.yaml"
    file.write_text("machines: [{count: 2, compute: {flops_per_second: 1e8}}]\nlink: {bandwidth: 100 Gbit/s}\n")
    page = tmp_path / "plan.html"
    assert main(["plan", "digits-mlp", "--on", str(file), "--within", "2", "--report", str(page), "--json"]) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["answer"]["plain_ddp"]
    assert "DistributedDataParallel" in values["answer"]["ddp_script"]
    assert values["answer"]["command"].startswith("torchrun --nnodes 2")
    assert values["rows"][0]["strategy"] == "bsp"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    console = Console(width=200, file=io.StringIO())
    console.print(table(values))
    assert seconds_text(values["rows"][0]["seconds_per_step"]) in console.file.getvalue().splitlines()[1]


def test_a_command_starts_as_many_ranks_as_the_machines_have_workers():
    options = TrainConfig(job="digits-mlp", strategy="bsp", batch_size=8, on="torchrun")
    given = "train digits-mlp --strategy bsp --batch-size 8"
    assert Command(options, [3]).line == f"dure {given} --workers 3 --on local"
    for ranks, each in (([2, 2], "2"), ([2, 2, 3], "RANKS")):
        start = f"torchrun --nnodes {len(ranks)} --node-rank NODE --nproc-per-node {each}"
        start += " --master-addr HOST --master-port 29500"
        assert Command(options, ranks).line == f"{start} -m dure {given} --on torchrun"


@pytest.mark.long
def test_the_smallest_change_makes_a_model_fit_that_fits_nowhere():
    here = Scene(load_job("digits-mlp"), cluster(memory=20_000), 256)
    with pytest.raises(UsageError, match=r"no strategy fits into .* The least is needed by") as refused:
        dure.plan(here.job, on=here.cluster)
    told = str(refused.value)
    assert "workers with" in told or "--batch-size" in told
    needed = int(float(told.partition("memory of ")[2].split()[0]) * 1000) + 1000
    strategy = told.partition("is needed by ")[2].partition(": ")[0]
    larger = here.on(cluster(memory=needed))
    assert largest_memory(setup_in(larger, strategy)).total <= needed
    with pytest.raises(UsageError, match="bytes of memory"):
        timed(here, strategy)
    timed(larger, strategy)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"job": ""}, "no job is named"),
        ({"job": "digits-mlp", "on": "nowhere"}, '"nowhere" is no place of a plan and no file'),
        ({"job": "digits-mlp", "on": "virtual", "target": 0.9, "target_loss": 1.0}, "target"),
        ({"job": "resnet50:batch=8"}, "resnet50:batch=8 has shapes and no values, so its steps"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        dure.plan(**options)


def test_workers_that_contradict_the_cluster_are_refused():
    with pytest.raises(UsageError, match="--workers 3 was asked for, and the cluster has 4"):
        dure.plan("digits-mlp", on=cluster(), workers=3)


def test_a_plan_warns_of_gpus_without_a_speed():
    job = load_job("digits-mlp")
    for compute, warned in (({}, True), ({"seconds": "10 ms"}, False), ({"flops_per_second": "5 TFLOP/s"}, False)):
        for kind, are_gpus in (({"gpus": 2}, True), ({"workers": 2}, False)):
            scene = Scene(job, Cluster(machines=[{**kind, "compute": compute}]), 64)
            assert (unstated(scene) != []) == (warned and are_gpus)
    assert "20 GFLOP/s is that of CPU cores" in unstated(Scene(job, Cluster(machines=[{"gpus": 2}]), 64))[0]
    stated = job.adjusted(block_seconds=[(1.0, 2.0)])
    assert unstated(Scene(stated, Cluster(machines=[{"gpus": 2}]), 64)) == []


def test_algorithms_that_a_run_sends_itself_have_a_caution_on_accelerators():
    gpus, cores = (Scene(load_job("digits-mlp"), Cluster(machines=[kind]), 64) for kind in ({"gpus": 2}, {"count": 2}))
    for strategy in ("bsp collective:algorithm=hierarchical", "bsp collective:algorithm=ring"):
        assert "is slower" in written_from_sends(gpus, strategy)[0]
        assert written_from_sends(cores, strategy) == []
    assert not any(written_from_sends(gpus, each) for each in ("bsp", "one machine", "downpour ps"))


def test_a_strategy_that_was_timed_alone_is_not_called_the_best_of_several():
    scene = Scene(load_job("digits-mlp"), cluster(), 128)
    found = Found([ranked("bsp", timed(scene, "bsp"), scene)], ["bsp", "averaging"], left={"averaging": 1e-9})
    said = why(found, {})
    assert said[0].startswith("It alone was timed. 1 other was not timed, as the seconds were over")
    assert not any("simplest" in each for each in said)


def test_variants_change_one_thing():
    here = cluster()
    assert with_bandwidth(here, 0.5).link.bandwidth == here.link.bandwidth / 2
    assert of_workers(here, 8).workers == 8
    assert without_limits(cluster(memory=10)).memory_of(0) is None
    slow = here.changed(machines=(Machines(count=3, compute=FAST), Machines(count=1, speed=0.2, compute=FAST)))
    assert with_equal_workers(slow).durations(0, 0).speed == pytest.approx(0.8)
    assert of_workers(slow, 8) is None


@pytest.mark.long
def test_a_target_that_nothing_reaches_is_said_to_be_so():
    found = dure.plan("digits-mlp", on=cluster(count=2), target=1.0, steps=3, learn=1, within=0.001)
    assert any("No strategy reached the target, accuracy 1: the nearest was 0." in sentence for sentence in found.why)
    reached = dure.plan("digits-mlp", on=cluster(count=2), target=0.2, steps=40, learn=1, within=0.001)
    assert not any("No strategy reached" in sentence for sentence in reached.why)
    assert reached.best.seconds_to_target is not None


def test_a_step_of_two_samples_has_sweeps():
    here = Scene(load_job("digits-mlp"), Cluster.uniform(2), 2)
    assert sweeps(here, ["bsp", "averaging:period=4"], Deadline(math.inf))["batch"].at == [1, 2, 4, 8]


def test_the_answer_says_that_others_were_not_timed():
    found = plan("digits-mlp", on=Cluster.uniform(4), within=0.001)
    assert found.found.left
    assert f"{len(found.found.left)} others were not timed" in " ".join(found.why)
    assert "no other" not in " ".join([*found.why, *sentences(found.values())])


def test_a_bottleneck_is_unknown_where_the_seconds_did_not_suffice():
    cluster = Cluster(machines=(Machines(count=4),), link=Link(bandwidth="1 Mbit/s"))
    here = Scene(load_job("digits-mlp"), cluster, batch=128)
    rows = [ranked("bsp", timed(here, "bsp"), here)]
    assert bottlenecks(here, rows, Deadline(-1.0)) == {}
    assert bottlenecks(here, rows, Deadline(60.0))["bsp"].startswith("network")


def few(monkeypatch, *strategies):
    """Let a plan have these candidates and one machine only."""
    monkeypatch.setattr(searching, "single", lambda shape: strategies)
    monkeypatch.setattr(searching, "on_servers", lambda *_: ())


def test_one_machine_is_the_answer_where_links_are_too_slow_for_exchanges(monkeypatch):
    """A model takes 1.5 s of the link, and a step 10 ms: one exchange in a run."""
    few(monkeypatch, "bsp", "ad-psgd")
    steps = Machines(count=4, compute=Constant(seconds=0.01))
    here = Scene(load_job("digits-mlp"), Cluster(machines=[steps], link=Link(bandwidth=12_500)), 4 * 32)
    found = searching.search(here, Deadline(math.inf))
    assert found.rows[0].strategy == ONE
    rows = {row.strategy: row for row in found.rows}
    assert rows["ad-psgd"].timing.samples_per_second > 3.5 * rows[ONE].timing.samples_per_second
    assert rows["ad-psgd"].score < 1.1 * rows[ONE].score
    assert "The fastest machine alone is as good as all workers: no other is" in " ".join(why(found, {}))
    line = command_of(here, PlanOptions(job="digits-mlp"), rows[ONE]).line
    assert line == "dure train digits-mlp --strategy bsp --batch-size 32 --workers 1 --on local"


def test_one_machine_is_the_fastest_with_all_its_workers():
    kinds = (Machines(count=2, workers=2, compute=FAST), Machines(count=1, workers=2, speed=3.0, compute=FAST))
    here = Scene(load_job("digits-mlp"), Cluster(machines=kinds), 6 * 32)
    assert (here.alone.workers, here.alone.batch) == (2, 64)
    alone = Cluster(machines=[Machines(workers=2, speed=3.0, compute=FAST)])
    same = timed(Scene(here.job, alone, 64), "bsp")
    timing = timed(here, ONE)
    assert timing.samples_per_second == pytest.approx(same.samples_per_second)
    assert timing.seconds == pytest.approx(3 * same.seconds)
    assert (timing.worker_machines, timing.batch_size) == (1, 32)
    host = Scene(here.job, Cluster(machines=[Machines(count=4)], host=SharedHost(cores=2)), 4 * 32)
    assert host.alone.workers == 1


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.described("2x4 t4 @ 1 Gbit/s"),
        Cluster(machines=(Machines(count=4, workers=4),), racks=Racks(machines=2)),
        Cluster(
            machines=(Machines(count=4, workers=4),),
            sites=(Site(machines=2), Site(machines=2)),
            between=SiteLine(bandwidth="1 Gbit/s", latency="10 ms"),
        ),
    ],
    ids=["accelerators", "racks", "sites"],
)
def test_one_machine_of_several_is_a_candidate_everywhere(cluster):
    """A machine with four workers takes as many steps of theirs as the cluster has machines."""
    job = load_job("digits-mlp")
    here = Scene(job, referred(cluster, job), 32 * cluster.workers)
    found = timed(here, ONE)
    assert here.alone.workers == 4
    assert found.seconds == pytest.approx(cluster.workers / 4 * timed(here.alone, "bsp").seconds)
    assert found.worker_machines == 1


def test_one_machine_is_trained_to_a_target_with_both_rates():
    job = load_job("digits-mlp")
    here = Scene(job, Cluster.uniform(4), 4 * job.batch_size)
    (curve,) = learned(here, [ONE], Target(0.3, "loss"), 100, lambda *_: None).values()
    assert curve.scaled  # 0.4 in place of 0.1
    slow = Target(0.3, "loss"), 30
    assert learned(here, [ONE], *slow, lambda *_: None)[ONE].seconds_to_target == pytest.approx(
        curve.seconds_to_target, rel=0.2
    )  # 30 steps of four workers are 120 of one


@pytest.mark.parametrize(("within", "said"), [(0.001, "Not known: the seconds did not suffice"), (20, "alters")])
def test_what_would_change_the_answer_is_never_empty(within, said, monkeypatch):
    few(monkeypatch, "bsp")
    found = dure.plan("digits-mlp", on=cluster(count=8, bandwidth=1e12), within=within)
    assert found.strategy == "bsp"
    assert any(said in each for each in found.would_change)
    assert found.would_change[0] in ending(found.values())


def test_seconds_that_suffice_for_no_strategy_are_refused_with_those_that_should(monkeypatch):
    monkeypatch.setattr(searching, "LEAST", 0.1)
    monkeypatch.setattr(side_by_side, "_timed", lambda scenes, wanted, began: time.sleep(600))
    with raising(UsageError, "no strategy could be timed within 1 seconds for 32 workers", "--within 52"):
        plan("digits-mlp", on=Cluster.uniform(32), within=1)


def test_a_report_that_cannot_be_written_is_refused_before_the_plan(tmp_path):
    for place, problem in ((tmp_path, "is a folder"), (tmp_path / "none" / "plan.html", "there is no folder")):
        with pytest.raises(UsageError, match=problem):
            PlanOptions(job="digits-mlp", report=place)


BROKEN = """
import dure, torch
from dure.job.job import load_job

class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x):
        raise ValueError("broken on purpose")

def job():
    here = load_job("digits-mlp")
    return dure.Job(model=Broken, loss=here.loss, train=here.train, test=here.test, batch_size=8)
"""


def test_a_model_whose_forward_raises_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    with pytest.raises(UsageError, match=r"broken.py:job.*broken on purpose"):
        plan(f"{path}:job", on=Cluster.uniform(2), within=2)


def test_a_run_to_a_target_ends_at_it():
    job = load_job("digits-mlp")
    here = Scene(job, Cluster.uniform(2), 2 * job.batch_size)
    (curve,) = learned(here, ["averaging:period=4"], Target(0.5, "loss"), 400, lambda *_: None).values()
    assert curve.seconds_to_target is not None
    assert curve.loss[-1] <= 0.5 < curve.loss[-2]
    assert len(curve.loss) < 25


def shown(values):
    """The ranks and strategies of the table."""
    out = io.StringIO()
    Console(file=out, width=200).print(table(values))
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.getvalue().splitlines()[1:]]
    return [(int(rank), strategy) for rank, strategy, *_ in lines]


def test_plain_data_parallelism_is_in_the_table_whatever_its_rank():
    rows = [row(rank, "1f1b:stages=4,micro=8") | {"servers": 0, "factor": 1.0} for rank in range(1, 21)]
    rows[14]["strategy"] = "bsp"
    assert shown({"rows": rows}) == [*((rank, "1f1b:stages=4,micro=8") for rank in range(1, 11)), (15, "bsp")]


def test_the_legend_says_that_bytes_and_memory_are_those_of_a_worker():
    basis = "Assumed: 20 GFLOP/s. How wrong the seconds are: not checked for these machines."
    text = ending(plan_values() | {"machines": "8 machines", "batch": BATCH * WORKERS, "basis": basis})
    assert "`memory` and `sent/step` are those of one worker" in text
    assert basis in text.splitlines()
    for sentence in plan_values()["open"]["said"]:
        assert text.splitlines().index(sentence) < text.splitlines().index(basis)
    closed = ending(plan_values() | {"machines": "8 machines", "batch": BATCH * WORKERS, "basis": basis, "open": None})
    assert "leaves facts open" not in closed


@pytest.mark.long
def test_the_table_of_a_plan_has_plain_data_parallelism_behind_the_first_ten():
    """All methods with rare or no waiting are faster on this network."""
    found = plan("digits-mlp", on=cluster(8, bandwidth=1e5), within=20)
    names = [each.strategy for each in found.rows]
    assert names.index("bsp") >= 10
    assert shown(found.values()) == [*enumerate(names[:10], 1), (names.index("bsp") + 1, "bsp")]


def shapes_alone():
    assert torch.get_default_device().type == "meta", "a plan needs no values of a large model"
    return torch.nn.Sequential(torch.nn.Linear(64, 1_000_000), torch.nn.Linear(1_000_000, 10, bias=False))


@pytest.mark.alone  # it ended a process that had run thousands of tests, once; the cause is not known
def test_a_plan_never_holds_the_values_of_a_large_model():
    digits = load_job("digits-mlp")
    job = dure.Job(model=shapes_alone, loss=digits.loss, train=digits.train, batch_size=8, name="large")
    assert plan(job, on=Cluster.uniform(2), within=1).scene.model.replica.numel > LARGE


def shapes_of_few():
    assert torch.get_default_device().type == "meta", "a plan needs no values of a job whose data have none"
    return torch.nn.Linear(64, 10)


def test_a_plan_of_data_without_values_never_holds_those_of_the_model():
    data = dure.Data(torch.empty(96, 64, device="meta"), torch.empty(96, dtype=torch.int64, device="meta"))
    job = dure.Job(model=shapes_of_few, loss=cross_entropy, train=data, batch_size=8, name="shapes")
    found = scene_of(PlanOptions.of({"job": "shapes", "on": "", "within": 1}), job, Cluster.uniform(2), lambda *_: None)
    assert found.model.replica.numel == 650
    assert found.model.replica.params.is_meta
    assert not found.has_values


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("workers", "cautioned"), [(2, False), (3, True)])
def test_more_workers_than_cores_are_cautioned_of(workers, cautioned):
    one_machine = Cluster(machines=[Machines(count=workers)], host=SharedHost(cores=2))
    found = dure.plan("digits-mlp", on=one_machine, within=0.001)
    assert any("workers share 2 cores" in each for each in found.why) == cautioned


@pytest.mark.long
def test_small_micro_batches_are_planned_where_they_alone_fit():
    """Two stages with four micro-batches need 4.2 MiB, and fit into 3 MB with more."""
    data = dure.Data(torch.ones(96, 1, 28, 28), torch.zeros(96, dtype=torch.int64))
    job = dure.Job(convnet, cross_entropy, data, data, batch_size=96, name="convnet")
    options = {"batch_size": 96, "within": 60}
    ranked = dure.plan(job, on=cluster(count=8, memory=3_000_000), **options)
    assert ranked.found.rows
    assert all(row.timing.memory.total <= 3_000_000 for row in ranked.found.rows)
    with pytest.raises(UsageError, match=r"remat=true: \d") as refused:
        dure.plan(job, on=cluster(count=8, memory=300_000), **options)
    assert "no strategy fits into" in str(refused.value)


def test_a_plan_of_a_job_without_values_gives_no_script_of_it(monkeypatch, tmp_path):
    few(monkeypatch, "bsp")
    (tmp_path / "job.yaml").write_text(
        "batch_size: 4\ninput_nbytes: 64\n"
        "blocks: [{name: a, forward: 1 ms, backward: 2 ms, parameter_nbytes: 64, output_nbytes: 64}]\n"
    )
    found = plan(f"{tmp_path / 'job.yaml'}", on=cluster())
    assert any("no values" in each for each in found.why)
    assert "make_job()" in found.ddp_script
    assert "load_job" not in found.ddp_script
    trained = plan("digits-mlp", on=cluster())
    assert not any("no values" in each for each in trained.why)
    assert "load_job('digits-mlp')" in trained.ddp_script


def test_unequal_links_change_by_a_share_of_their_bandwidths():
    slow = Machines(compute=FAST, link=Link(bandwidth=1e8))
    swept = Sweep("bytes per second", 1e9, 2)
    scenes = {kind: Scene(load_job("digits-mlp"), each, 128) for kind, each in (("equal", cluster()),)}
    scenes["unequal"] = scenes["equal"].on(Cluster(machines=(Machines(count=3, compute=FAST), slow)))
    bsp, averaging = (ranked(each, timed(scenes["equal"], each), scenes["equal"]) for each in ("bsp", "averaging"))
    swept.add(1e9 / 16, [averaging])
    swept.add(1e9, [bsp])
    for kind, said in (
        ("equal", "At 500 Mbit/s or less"),
        ("unequal", "At 1/16 of all bandwidths (500 Mbit/s) or less"),
    ):
        assert would_change(scenes[kind], [bsp], {"bandwidth": swept}, Deadline(0.0))[0] == f"{said}: averaging."


def test_a_value_at_which_no_strategy_works_is_a_change():
    scene = Scene(load_job("digits-mlp"), cluster(), 128)
    bsp = ranked("bsp", timed(scene, "bsp"), scene)
    swept = Sweep("samples per step", 128, 2)
    swept.add(128, [bsp])
    swept.add(256, [None])  # as where a larger batch does not fit into memory
    (said,) = would_change(scene, [bsp], {"batch": swept}, Deadline(0.0))
    assert said == "At 256 samples per step or more: none of the best strategies works."


def test_changes_of_an_answer_by_a_target_count_its_measured_steps():
    """`averaging` has the better assumed score at each bandwidth, and was measured to need many more steps."""
    scene = Scene(load_job("digits-mlp"), cluster(), 128)
    bsp, averaging = (ranked(each, timed(scene, each), scene) for each in ("bsp", "averaging"))
    assert averaging.score > bsp.score
    swept = Sweep("bytes per second", 1e9, 3)
    for bandwidth in (1e7, 1e9, 1e11):
        swept.add(bandwidth, [bsp, averaging])
    assumed = would_change(scene, [bsp, averaging], {"bandwidth": swept}, Deadline(0.0))
    assert [each.partition(": ")[2] for each in assumed] == ["averaging.", "averaging."]
    known = [with_target(bsp, 1.0), with_target(averaging, 50.0)]
    unchanged, other = would_change(scene, known, {"bandwidth": swept, "batch": swept}, Deadline(0.0))
    assert unchanged.startswith("No change that was timed alters the answer: bandwidth")
    assert other == "Other numbers of workers and samples were not tried with the target."
