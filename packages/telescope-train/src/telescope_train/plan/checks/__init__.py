"""Which settings fit together. Pure; every message says what to change."""
