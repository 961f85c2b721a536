"""Recipes (YAML) and the typed schema that checks them: data, not code."""
