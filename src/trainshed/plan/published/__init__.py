"""Published measurements, and how well the planner predicts them."""
