"""The studio around the algorithm: graph model, storage, worker and commands."""
