"""What a budget buys: failures, goodput, and servers that train, stand by or hold copies."""
