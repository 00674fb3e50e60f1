"""Block layouts of weights and caches, one file each."""
