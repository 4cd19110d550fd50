"""Start and observation of processes: fork server, rendezvous, output relay, shared key, signals."""
