"""The FSDP2 backend: torch shards the model over the ranks; runs in the ranks."""
