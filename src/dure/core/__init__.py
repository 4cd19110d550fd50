"""Values and small functions for all other packages: nodes, names and their texts, ranges, costs."""
