"""Which settings fit together. Pure; every message tells what to change."""
