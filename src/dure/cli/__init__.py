"""The command `dure`."""
