"""Authoring of environments: creating a project, building, publishing and yanking releases."""
