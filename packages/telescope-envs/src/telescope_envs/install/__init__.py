"""From a name to an environment that runs: install, lock, sync, bundle, link and verify."""
