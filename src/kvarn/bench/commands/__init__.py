"""Subcommands of `kvarn bench`, one file each; a file's `COMMAND` is its click command."""
