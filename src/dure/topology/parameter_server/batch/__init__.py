"""Batch methods over servers: a coordinator, portions of data, vectors on the shards."""
