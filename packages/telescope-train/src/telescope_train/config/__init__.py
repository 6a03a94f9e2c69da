"""Every setting of `telescope train`: name, type, default, and no more. Imports no torch.

`telescope_train.plan` reads files into them, and `plan.checks` refuses what does not fit together.
"""
