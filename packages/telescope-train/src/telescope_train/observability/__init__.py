"""Displays and exports of a run besides its rows: the terminal, meters, spans, traces, trackers."""
