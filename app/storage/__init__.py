"""Run directories, events, metrics and checkpoints on disk; standard library only."""
