"""Start of processes: fork server, rendezvous, relay, shared key, interruption."""
