"""The layouts there are for a job, and the fastest that fit."""
