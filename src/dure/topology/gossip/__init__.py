"""Workers that average in pairs along a graph."""
