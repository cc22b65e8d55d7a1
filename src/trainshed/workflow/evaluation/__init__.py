"""The `eval` of a recipe and `trainshed eval`: which weights are measured, by what, and where scores are stored."""
