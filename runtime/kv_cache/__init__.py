"""KV cache memory: blocks, block tables, prefix hashes and sizing. Pure Python."""
