"""Values and small functions that every other package uses: nodes, names, ranges, costs."""
