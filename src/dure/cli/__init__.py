"""The command `dure`: its subcommands, the tables of `dure methods`, and reproductions of papers."""
