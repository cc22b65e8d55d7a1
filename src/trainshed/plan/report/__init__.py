"""The planner's answer for people and programs: JSON, words, pictures."""
