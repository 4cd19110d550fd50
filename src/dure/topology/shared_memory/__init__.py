"""Workers of one machine that write to one model in shared memory."""
