"""The Megatron backend: megatron-core shares one model over ranks; runs in the ranks."""
