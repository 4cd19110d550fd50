"""The two runtimes: virtual time, and processes with sockets."""
