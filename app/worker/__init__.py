"""Runs compiled graphs: scheduler, run context, cache, checkpoints of runs. May import torch."""
