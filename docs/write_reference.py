"""Write the reference pages from the schemas, the command line and the engines' key tables.

python docs/write_reference.py
"""

from pathlib import Path

from trainshed.cli.reference import command_reference
from trainshed.engines.key_reference import fill_key_tables
from trainshed.recipe.schema_export import cluster_reference, recipe_reference

if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "recipe-reference.md").write_text(recipe_reference(), encoding="utf-8")
    (folder / "cluster-reference.md").write_text(cluster_reference(), encoding="utf-8")
    (folder / "cli-reference.md").write_text(command_reference(), encoding="utf-8")
    for page in folder.glob("from-*.md"):
        page.write_text(fill_key_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
