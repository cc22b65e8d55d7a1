"""A plan for people to read: sentences, charts, and an HTML page."""
