"""Ranks strategies for a job on a cluster (`dure plan`, `sync="auto"`), and measures machines (`dure probe`)."""
