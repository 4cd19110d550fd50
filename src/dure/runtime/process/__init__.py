"""The runtime of real processes: a node, its groups, its engine of collectives."""
