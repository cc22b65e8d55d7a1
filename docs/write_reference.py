"""Write the reference pages from the schema: `python docs/write_reference.py`."""

from pathlib import Path

from trainshed.recipe.schema_export import cluster_reference, recipe_reference

if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "recipe-reference.md").write_text(recipe_reference(), encoding="utf-8")
    (folder / "cluster-reference.md").write_text(cluster_reference(), encoding="utf-8")
