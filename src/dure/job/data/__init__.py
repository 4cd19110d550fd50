"""Data sets, and the distribution of their samples to workers.

    | file        | contents                                                                       |
    |-------------|--------------------------------------------------------------------------------|
    | dataset.py  | `DataSet`: the protocol, and the structure of batches; `Data`: samples in memory; |
    |             | `Samples`: a map-style data set, as `torch.utils.data.Dataset`, with a collate |
    | stream.py   | `Stream`: windows of a long text, for language models                          |
    | loaders.py  | `load_digits`: 8x8 digits, part of this package; `load_characters`: a text as a `Stream`; |
    |             | `data_root`: the folder of all other data sets                                 |
    | split.py    | `parse_split`: `iid`, `whole`, `striped`, `dirichlet`; `Sampler`: one worker's batches |

A loader returns `Loaded(train, test, source)`; `source` states in words how many samples were found, and where. A
loader raises `DataError` if a file is missing or damaged. The distribution `dure-jobs` has loaders of published sets.
"""

from dure.job.data.dataset import Data, DataSet, Loaded, Samples
from dure.job.data.loaders import data_root, load_characters, load_digits
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
