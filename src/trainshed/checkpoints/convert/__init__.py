"""Weights from one format into another: streamed, gone on with after a kill, published when they are proven."""
