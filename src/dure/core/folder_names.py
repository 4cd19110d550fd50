"""Names in the folder of a run, for modules that must not import torch."""

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints."""

LATEST = "LATEST"
"""Name of the file, in that folder, that names the newest checkpoint."""
