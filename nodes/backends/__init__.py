"""Wrappers of model, data and scorer libraries; they know nothing of the graph."""
