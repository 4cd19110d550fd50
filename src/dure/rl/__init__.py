"""Distributed reinforcement learning: replay of transitions, exploration, environments and the losses of learners.

Algorithms only. Actors, replay servers and learners are started by `dure.run`.
"""
