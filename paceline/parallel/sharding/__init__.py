"""A model's state shared out among workers (ZeRO): flat memory, gradients, and gathering."""
