"""The Megatron backend: megatron-core shares one model over ranks in many ways; runs in the ranks."""
