"""Compares EASGD with Downpour SGD by the steps between two exchanges.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015, figures 1 to 4: with the periods
1, 4, 16 and 64, Downpour becomes slower and unstable, and EASGD stays fast. There, 4 workers train on CIFAR-10. Both
exchange a model's change of `period` steps; Downpour's workers step alone between two exchanges (`local_lr`).
"""

from __future__ import annotations

from collections.abc import Mapping

from dure.cli.reproduce.study import Setting, Statement, Study

WORKERS = 8
RATE = 0.1
PERIODS = (1, 4, 16, 64)


def _settings() -> Mapping[str, Setting]:
    from dure.runtime.virtual.cluster import Cluster, Link

    cluster = Cluster.uniform(WORKERS, link=Link(bandwidth="1 Gbit/s"))
    found = {}
    for period in PERIODS:
        easgd = f"easgd:period={period} ps"
        downpour = f"downpour:n_push={period},n_fetch={period},local_lr={RATE} ps"
        for line, strategy in (("EASGD", easgd), ("Downpour", downpour)):
            found[f"{line}, period {period}"] = Setting(
                strategy=strategy, cluster=cluster, options={"lr": RATE}, line=line, at=period
            )
    return found


STUDY = Study(
    name="elastic",
    about=f"mnist-mlp with {WORKERS} workers over one server, learning rate {RATE}.",
    settings=_settings,
    columns=("accuracy", "seconds", "seconds_to_target", "megabytes", "staleness"),
    x="steps between two exchanges",
    statements=(
        Statement(
            "EASGD bears a period of 64: at least 90 %",
            lambda row: row["EASGD, period 64"]["accuracy"] >= 0.9,
        ),
        Statement(
            "Downpour fails at a period of 16: less than 50 %",
            lambda row: row["Downpour, period 16"]["accuracy"] < 0.5,
        ),
    ),
)
reproduce, table, QUICK = STUDY.reproduce, STUDY.table, STUDY.quick
