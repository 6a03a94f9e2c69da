"""Ray: the cluster, places for processes, ports, and detecting their death. Runs in the driver."""
