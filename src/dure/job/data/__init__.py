"""Data sets, and the distribution of their samples to workers.

    | file        | contents                                                                       |
    |-------------|--------------------------------------------------------------------------------|
    | structure.py | inputs and targets of a batch: a tensor, a mapping or a tuple of tensors      |
    | dataset.py  | `DataSet`: the protocol of the next three; `Data`: samples in memory           |
    | samples.py  | `Samples`: a map-style data set, as `torch.utils.data.Dataset`, with a collate |
    | stream.py   | `Stream`: windows of a long text, for language models                          |
    | characters.py | `load_characters`: a text file, or Python's manual, as a `Stream` of characters |
    | location.py | `data_root`: the folder that holds data sets                                   |
    | digits.py   | `load_digits`: 8x8 digits, part of this package (`digits.npz`)                 |
    | split.py    | `parse_split`: `iid`, `whole`, `striped`, `dirichlet`; `Sampler`: one worker's batches |

A loader returns `Loaded(train, test, source)`; `source` states in words how many samples were found, and where. A
loader raises `DataError` if a file is missing or damaged. The distribution `dure-jobs` has loaders of published sets.
"""

from dure.job.data.characters import load_characters
from dure.job.data.dataset import Data, DataSet, Loaded
from dure.job.data.digits import load_digits
from dure.job.data.location import data_root
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
    "load_characters",
    "load_digits",
    "parse_split",
]
