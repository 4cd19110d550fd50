"""Names in a run's folder that are needed before, or without, anything that imports torch."""

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints."""

LATEST = "LATEST"
"""The file in it that names the newest."""
