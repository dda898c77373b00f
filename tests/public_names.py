"""What a program that users read takes from h2okv."""

import ast

import h2okv


def internals(source):
    """List what a program uses of h2okv beside the names of `h2okv.__all__`."""
    used = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            used += [node.module]
        elif isinstance(node, ast.Import):
            used += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "h2okv":
            used += [f"h2okv.{node.attr}"] * (node.attr not in h2okv.__all__)
    return [name for name in used if name.startswith("h2okv.")]
