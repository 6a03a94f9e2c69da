"""Every setting of `telescope train`: name, type, default, and no more. Imports no torch.

`telescope_train.plan.load` reads settings files into them and checks that they fit together.
"""
