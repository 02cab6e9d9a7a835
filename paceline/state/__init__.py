"""The state of a training run: snapshots, versions, blocks and checksums."""
