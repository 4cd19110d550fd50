"""One run: its strategy, its set-up, its driver and processes, its checkpoints and its outcome."""
