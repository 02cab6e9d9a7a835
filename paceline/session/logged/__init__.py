"""What a script gives to `run.log`, as it is kept until it is handed over."""
