"""What a run tells about itself: events, and figures with their formula and source."""
