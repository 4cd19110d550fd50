"""Values of a plan as `dure plan` gives them to its page: realistic, and made without a plan."""

from __future__ import annotations

from typing import Any

PARAMETERS = 25_557_032
WORKERS, BATCH = 8, 64
RATE = 1.25e9
COMPUTE, OVERHEAD = 1.9e-3, 12e-3
GRADIENT = 4 * PARAMETERS
BANDWIDTHS = sorted([RATE, *(6.25e6 * 2**step for step in range(12))])
SENT = {
    "bsp ring": 2 * 7 / 8,
    "bsp ps:shards=8": 2 * 7 / 8,
    "averaging:period=8 ring": 2 * 7 / 8 / 8,
    "downpour ps:shards=4": 2.0,
    "bsp ring 1bit": 2 * 7 / 8 / 30,
    "bsp ring top-k:ratio=0.01": 0.14,
    "diloco:period=64 ring": 2 * 7 / 8 / 64,
    "1f1b:stages=4,micro=8": 0.11,
    "gossip:graph=ring": 2.0,
    "zero:stage=2 ring": 2 * 7 / 8,
}
"""Gradients that a worker sends in a step."""

EXTRA = {
    "bsp ring": 1.00,
    "bsp ps:shards=8": 1.04,
    "averaging:period=8 ring": 1.01,
    "downpour ps:shards=4": 1.02,
    "bsp ring 1bit": 1.35,
    "bsp ring top-k:ratio=0.01": 1.6,
    "diloco:period=64 ring": 1.06,
    "1f1b:stages=4,micro=8": 1.45,
    "gossip:graph=ring": 1.03,
    "zero:stage=2 ring": 1.05,
}
"""Seconds of computing, coding and idling as a multiple of those of computing."""


def seconds(strategy: str, *, bandwidth: float = RATE, workers: float = WORKERS, batch: float = BATCH) -> float | None:
    """Seconds of a step: computing, and what of the communication is not hidden behind it."""
    if strategy.startswith("1f1b") and workers < 4:
        return None
    ways = 4 if strategy.startswith("1f1b") else 1
    compute = EXTRA[strategy] * (OVERHEAD + batch * COMPUTE) / (1 if ways == 1 else 1.0)
    sent = SENT[strategy] * GRADIENT * (1 - 1 / max(workers, 1.0)) * 8 / 7
    return compute + max(sent / bandwidth - 0.3 * compute, 0.02 * sent / bandwidth)


def speed(strategy: str, **at: float) -> float | None:
    """Samples per second of all workers."""
    taken = seconds(strategy, **at)
    return None if taken is None else at.get("batch", BATCH) * at.get("workers", WORKERS) / taken


def command(strategy: str) -> str:
    return (
        f'dure train imagenet-resnet50 --on lab.yaml --workers {WORKERS} --strategy "{strategy}" --batch-size {BATCH}'
    )


def row(rank: int, strategy: str) -> dict[str, Any]:
    taken = seconds(strategy) or 0.0
    factor = 1.3 if strategy.startswith(("downpour", "diloco", "gossip")) else 1.0
    stages = 4 if strategy.startswith("1f1b") else 1
    return {
        "rank": rank,
        "strategy": strategy,
        "batch": BATCH,
        "seconds_per_step": taken,
        "samples_per_second": speed(strategy) or 0.0,
        "seconds_to_target": 1.9e6 * factor / (speed(strategy) or 1.0) if rank <= 4 else None,
        "memory": {
            "weights": GRADIENT // stages,
            "gradient": GRADIENT // stages,
            "optimizer": GRADIENT // (8 if strategy.startswith("zero") else stages),
            "versions": 3 * GRADIENT // stages if stages > 1 else GRADIENT if "downpour" in strategy else 0,
            "activations": 95_000_000 * BATCH // stages,
        },
        "memory_limit": 8_000_000_000,
        "bytes_per_step": SENT[strategy] * GRADIENT,
        "cost_per_hour": 4.16,
        "bottleneck": "network" if taken > 1.5 * (OVERHEAD + BATCH * COMPUTE) else "compute",
        "command": command(strategy),
    }


def learning(strategy: str, speed: float | None) -> float | None:
    """The speed for learning: local updates and stale gradients need more samples."""
    return None if speed is None else speed / (1.3 if strategy.startswith(("downpour", "diloco", "gossip")) else 1.0)


def with_scores(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with a score in its sweeps, by which strategies rank."""
    for swept in plan["sweeps"].values():
        speeds = swept["samples_per_second"].items()
        swept["score"] = {name: [learning(name, speed) for speed in line] for name, line in speeds}
    return plan


def sweep(unit: str, axis: str, at: list[float], now: float) -> dict[str, Any]:
    return {
        "unit": unit,
        "at": at,
        "now": now,
        "samples_per_second": {name: [speed(name, **{axis: place}) for place in at] for name in SENT},
        "seconds_per_step": {name: [seconds(name, **{axis: place}) for place in at] for name in SENT},
    }


def spans() -> list[dict[str, Any]]:
    """Two steps of a ring: backward overlaps the communication of the first buckets."""
    found: list[dict[str, Any]] = []
    for number in range(WORKERS):
        late = 0.004 * (number % 3)
        for step in range(2):
            start = 0.2 * step
            parts = [
                ("compute", "forward", 0.0, 0.045 + late),
                ("compute", "backward", 0.045 + late, 0.134 + late),
                ("communicate", "all-reduce 1", 0.09 + late, 0.15 + late / 2),
                ("wait", "", 0.15 + late / 2, 0.158),
                ("communicate", "all-reduce 2", 0.158, 0.192),
            ]
            found += [
                {"worker": f"worker {number}", "kind": kind, "start": start + begin, "end": start + end, "name": name}
                for kind, name, begin, end in parts
            ]
    return found


def plan_values() -> dict[str, Any]:
    """Every part, with a plan's usual sizes."""
    order = sorted(SENT, key=lambda strategy: -(speed(strategy) or 0.0))
    rows = [row(rank, strategy) for rank, strategy in enumerate(order, 1)]
    best = rows[0]
    return {
        "job": "imagenet-resnet50",
        "cluster": "lab.yaml",
        "workers": WORKERS,
        "parameters": PARAMETERS,
        "optimizer": "sgd",
        "version": "0.9.0",
        "answer": {
            "strategy": best["strategy"],
            "command": best["command"],
            "why": [
                "Its communication is an eighth of a ring's in each step, so it hides behind the backward pass.",
                "Averaging every 8 steps is assumed to need 12 % more samples than synchronous SGD.",
            ],
            "would_change": [
                "Above 26 Gbit/s plain synchronous SGD is as fast, and simpler.",
                "Below 400 Mbit/s a period of 64 steps is faster.",
                "Batches above 512 per worker hide the communication of every strategy.",
            ],
            "plain_ddp": False,
            "ddp_script": None,
        },
        "rows": rows,
        "open": {
            "said": [
                "The cluster leaves facts open, so bsp ring has 1,900 to 2,400 samples/s (steps of 213 ms to 269 ms).",
                "Most of that is the transport: 1,900 (TCP at 8 Gbit/s of a card) to 2,400 (as assumed).",
            ]
        },
        "refused": [
            {"strategy": "zero:stage=3 ring", "reason": "weights that are split need a model in blocks"},
            {"strategy": "1f1b:stages=8,micro=8", "reason": "the model has 4 blocks, and 8 stages need 8"},
        ],
        "sweeps": {
            "bandwidth": sweep("bytes per second", "bandwidth", BANDWIDTHS, RATE),
            "workers": sweep("workers", "workers", [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], WORKERS),
            "batch": sweep("samples per worker", "batch", [8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0], BATCH),
        },
        "timeline": {"strategy": best["strategy"], "seconds": 0.4, "spans": spans()},
        "curves": [
            {
                "strategy": name,
                "seconds": [40.0 * step * (1 + 0.2 * place) for step in range(30)],
                "loss": [0.6 + 6.3 * (0.86 - 0.01 * place) ** step for step in range(30)],
            }
            for place, name in enumerate(order[:4])
        ],
        "target": 0.9,
    }
