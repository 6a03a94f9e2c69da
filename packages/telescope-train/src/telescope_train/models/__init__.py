"""The model of a rank: finding, loading and adapting it, and its log-probs.

`facts`, `location` and `device` do without torch, for the plan; the rest runs in the trainer ranks.
"""
