"""The runtime of real processes: their node, their groups, and the engine (torch.distributed) of collectives."""
