"""The verbs of `trainshed model`."""
