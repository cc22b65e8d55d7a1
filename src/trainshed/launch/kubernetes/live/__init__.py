"""A cluster that answers: applying, listing, reading logs, and what it all means in a sentence."""
