"""Ray: the cluster, places for processes, ports, and noticing their death. Runs in the driver."""
