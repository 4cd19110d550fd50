"""Measurements of training that others published, beside predictions for the machines that their sources state.

| module         | contents                                                                     |
|----------------|------------------------------------------------------------------------------|
| `rows.py`      | a file of rows: cluster, what is assumed, what is left open, figures         |
| `predict.py`   | the prediction of a figure, and its interval over what is left open          |
| `score.py`     | how near predictions are, and the list of figures that are scored            |
| `constants.py` | what was fitted or chosen in sight of rows, and its values without them      |
| `variants.py`  | scores without these rows, and without parts of the model                    |
| `study.py`     | `dure reproduce published`                                                   |

A figure is a ratio: samples per second of a worker, relative to one worker alone or to another setting. Seconds of one
worker are the only calibration of a row.
"""

from dure_studies.published.study import quick, reproduce, table

__all__ = ["quick", "reproduce", "table"]
