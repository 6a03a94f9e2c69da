"""The parts of `bench_recording.py`."""
