"""Add a pipeline: eager 1F1B, which dure does not contain, as one class in its own file.

Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023: 1F1B with about twice the forwards
ahead, so that a worker has one to compute while the tensors of the next are on their way.

    min(U, 2 (K - 1 - k)) forwards, then F and B in turn, then the backwards that are left    at worker k = 0 .. K - 1

Backwards have the order of 1F1B, so the updates are the same to the last bit. More activations are kept.
"""

from dataclasses import dataclass

import dure


@dataclass(frozen=True)
class Eager(dure.MicroBatched):
    """Flush pipeline: 1F1B with twice the forwards ahead."""

    def order(self, rank, batches):
        ahead = min(2 * (self.stages - 1 - rank), self.micro)
        for batch in batches:
            for micro in range(ahead):
                yield dure.Action("F", batch, micro)
            for micro in range(self.micro):
                if micro + ahead < self.micro:
                    yield dure.Action("F", batch, micro + ahead)
                yield dure.Action("B", batch, micro)
            yield dure.Action("U", batch)


if __name__ == "__main__":
    print(f"{'pipeline':40}{'accuracy':>9}{'seconds':>9}")
    for partition in ("gpipe", "1f1b", f"{__file__}:Eager"):
        asked = f"{partition}:stages=2,micro=8"
        run = dure.train("digits-mlp", partition=asked, on="virtual", workers=2, steps=150, lr=0.4)
        figures = run.summary()
        print(f"{asked.rpartition('/')[2]:40}{figures['accuracy']:9.3f}{figures['seconds']:9.2f}")
