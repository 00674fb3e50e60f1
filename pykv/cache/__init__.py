"""The KV cache: pages, tables, sequences."""
