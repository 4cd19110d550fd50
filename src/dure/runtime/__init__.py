"""The two runtimes of a node: virtual time, and processes that communicate over sockets."""
