"""Workers as one group: all_reduce and its algorithms."""
