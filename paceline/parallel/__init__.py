"""Where the model's parts live."""
