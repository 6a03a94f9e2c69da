"""Every setting of `telescope train`: its name, type, default and description. Imports no torch.

`telescope_train.plan` reads settings files, and `plan.checks` refuses settings that do not fit
together.
"""
