"""Workers and servers: shards of the model, and the clock that admits updates."""
