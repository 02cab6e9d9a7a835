"""The state of a model shared out among workers: flat memory, its gradients, and when it is
whole.
"""
