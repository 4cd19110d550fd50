"""Data sets, and the distribution of their samples to workers.

    | file        | contents                                                                       |
    |-------------|--------------------------------------------------------------------------------|
    | structure.py | inputs and targets of a batch: a tensor, a mapping or a tuple of tensors      |
    | dataset.py  | `DataSet`: the protocol of the next three; `Data`: samples in memory           |
    | samples.py  | `Samples`: a map-style data set, as `torch.utils.data.Dataset`, with a collate |
    | stream.py   | `Stream`: windows of a long text, for language models                          |
    | characters.py | `load_characters`: a text file, or Python's manual, as a `Stream` of characters |
    | location.py | `data_root`: the folder that holds data sets; `find`: a file in it             |
    | download.py | `fetch`: a published file, checked and written whole or not at all             |
    | archive.py  | `files`: the files of a tar.gz archive, checked and read without unpacking     |
    | digits.py   | `load_digits`: 8x8 digits, part of this package (`digits.npz`)                 |
    | mnist.py    | `load_mnist`: the published IDX files                                          |
    | cifar10.py  | `load_cifar10`: the published binary layout, packed or unpacked                |
    | imdb.py     | `load_imdb`: film reviews as published, as rows of a vocabulary                |
    | split.py    | `parse_split`: `iid`, `whole`, `striped`, `dirichlet`; `Sampler`: one worker's batches |

A loader returns `Loaded(train, test, source)`; `source` states in words how many samples were found, and where. A
loader raises `DataError` if a file is missing or damaged. Pixels are read as uint8 and returned as float32.
"""

from dure.job.data.characters import load_characters
from dure.job.data.cifar10 import load_cifar10
from dure.job.data.dataset import Data, DataSet, Loaded
from dure.job.data.digits import load_digits
from dure.job.data.download import fetch
from dure.job.data.imdb import load_imdb
from dure.job.data.location import data_root, find
from dure.job.data.mnist import load_mnist
from dure.job.data.samples import Samples
from dure.job.data.split import IID, Dirichlet, Replicated, Sampler, Split, Striped, parse_split
from dure.job.data.stream import Stream

__all__ = [
    "IID",
    "Data",
    "DataSet",
    "Dirichlet",
    "Loaded",
    "Replicated",
    "Sampler",
    "Samples",
    "Split",
    "Stream",
    "Striped",
    "data_root",
    "fetch",
    "find",
    "load_characters",
    "load_cifar10",
    "load_digits",
    "load_imdb",
    "load_mnist",
    "parse_split",
]
