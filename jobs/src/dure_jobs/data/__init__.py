"""Readers of published data sets.

    | file          | contents                                                                     |
    |---------------|------------------------------------------------------------------------------|
    | location.py   | `find`: a file of a data set                                                 |
    | download.py   | `fetch`: a published file, checked and written whole or not at all           |
    | archive.py    | `files`: the files of a tar.gz archive, checked and read without unpacking   |
    | mnist.py      | `load_mnist`: the published IDX files                                        |
    | cifar10.py    | `load_cifar10`: the published binary layout, packed or unpacked              |
    | imdb.py       | `load_imdb`: film reviews as published, as rows of a vocabulary              |
    | wordpieces.py | `load_pieces`: the same reviews as numbers of word pieces                    |

A loader returns `dure.job.data.dataset.Loaded`; its `source` states in words how many samples were found, and where. A
loader raises `DataError` if a file is missing or damaged. Pixels are read as uint8 and returned as float32.
"""
