"""The help of flags that several studies take."""

from __future__ import annotations

from tyro.conf import arg

ROUNDS = arg(help="Steps of each run.")
SEEDS = arg(help="Number of seeds.")
DATA = arg(help="Folder of data sets; else DURE_DATA, else the user's cache.")
OUT = arg(help="Where to draw the curves, as SVG.")
