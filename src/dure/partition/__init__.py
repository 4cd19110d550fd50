"""How is the model split?

| name   | class   | a worker holds              |
|--------|---------|-----------------------------|
| `none` | `Whole` | the whole model             |
"""

from dure.core.catalogue import Entry

__all__ = ["CATALOGUE"]

CATALOGUE = {
    "none": Entry(
        "dure.partition.whole",
        "Whole",
        "every worker holds the whole model (data parallel)",
        "Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014, section 3",
    ),
}
