"""Layers that several workers share: each holds a part, and collectives join the parts within forward and backward."""
