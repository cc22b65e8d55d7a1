"""Recipes, engine tasks and plans for tests, and the golden files."""
