"""The world's published measurements, and how well the planner predicts them."""
