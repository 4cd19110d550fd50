"""Count the gradients that are applied in a fifth of a second if one machine of eight is five times slower.

The runs are timing-only: they compute no gradients and model when each worker computes, sends and waits. So they take
a moment for any model.
"""

import dure
from dure.runtime.virtual.cluster import Machines

even = dure.Cluster.uniform(8)
uneven = dure.Cluster(machines=(Machines(count=7), Machines(count=1, speed=0.2)))

print(f"{'strategy':22}{'equal machines':>16}{'one slow':>12}")
for strategy in ("bsp ps", "ssp:bound=3", "downpour:at_once=true"):
    gradients = []
    for cluster in (even, uneven):
        run = dure.train("digits-mlp", strategy=strategy, on=cluster, seconds=0.2, timing_only=True)
        gradients.append(run.summary()["updates_applied"])
    print(f"{strategy:22}{gradients[0]:16d}{gradients[1]:12d}")
