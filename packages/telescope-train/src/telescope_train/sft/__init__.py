"""`telescope sft`: supervised training on chats or golden answers.

Runs in the driver, which is its only rank.
"""
