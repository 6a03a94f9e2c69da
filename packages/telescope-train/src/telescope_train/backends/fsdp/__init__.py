"""The FSDP2 backend: a model sharded over the ranks by torch. Runs in the ranks."""
