"""The model a rank computes with: finding, loading and adapting it, and its log-probs.

`facts` and `location` read a model folder without torch, for the plan; the rest runs in the trainer
ranks.
"""
