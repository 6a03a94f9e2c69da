"""What `bench_diagnosis` plants, and the runs in which it does."""
