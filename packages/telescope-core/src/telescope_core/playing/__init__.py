"""One rollout and one group, played in the process that holds the environment.

That is a worker of the environment, or the process of an eval or a test.
"""
