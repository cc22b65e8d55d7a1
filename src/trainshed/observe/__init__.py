"""What a run reports about itself: events, exports, status, failures, and figures with their formula and source."""
