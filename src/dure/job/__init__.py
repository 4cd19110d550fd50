"""What is trained: a model, a loss, data, an optimizer; and how gradients are computed."""
