"""Measurement of machines for a plan."""
