"""The state of a training: snapshots of it, their versions and checksums."""
