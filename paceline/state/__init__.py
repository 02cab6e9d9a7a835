"""What the state of a training is: snapshots of it, their versions and checksums."""
