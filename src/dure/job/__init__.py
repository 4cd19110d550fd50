"""Jobs: a model, a loss, data and an optimizer; and the computation of gradients."""
