"""One machine of eight is five times slower. How many gradients does the model take in a fifth of a second?

Nothing is computed: a timing-only run models who computes, sends and waits when, and takes a moment for any model.
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
