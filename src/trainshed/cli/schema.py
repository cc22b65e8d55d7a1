"""`trainshed schema`: the JSON schema of recipes and cluster files, for editors."""

from __future__ import annotations


def schema(*, cluster: bool = False) -> None:
    """Print the JSON schema of a recipe, for editors.

    Save it and point your editor at it: a first line of
    `# yaml-language-server: $schema=recipe.schema.json` gives completion and checks while typing.

    Parameters
    ----------
    cluster
        The schema of a cluster file instead.
    """
    from trainshed.catalog import preset_names
    from trainshed.cli.console import print_report
    from trainshed.recipe import cluster_json_schema, recipe_json_schema

    print_report(cluster_json_schema() if cluster else recipe_json_schema(preset_names()), "json", "")
