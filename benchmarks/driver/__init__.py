"""One side of `bench_driver.py`: the stages of a rollout in the driver."""
