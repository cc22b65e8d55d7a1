"""The verbs of `trainshed data`."""
