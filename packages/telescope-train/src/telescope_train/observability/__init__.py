"""What a run shows and sends beside its rows: the terminal, meters, spans, traces, trackers."""
