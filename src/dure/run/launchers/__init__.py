"""Launchers of runs: on this machine, and under torchrun."""
