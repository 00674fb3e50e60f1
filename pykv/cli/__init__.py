"""The `pykv` command."""
