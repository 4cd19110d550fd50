"""DistBelief's partition: the units of each layer at any machines, and activations sent where others read them."""
