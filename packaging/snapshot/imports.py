"""Which modules a Python source can import: for take.py, and for the test of what a start may load."""

import ast


def find_imports(source: str) -> set[str]:
    """Return the imports of a source, in functions too, but not for type checkers: MODULE, or MODULE:NAME of "from"."""

    def imported(tree: ast.AST) -> set[str]:
        if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
            return set().union(*map(imported, tree.orelse))
        names: set[str] = set()
        if isinstance(tree, ast.Import):
            names = {alias.name for alias in tree.names}
        elif isinstance(tree, ast.ImportFrom) and tree.module:
            names = {f"{tree.module}:{alias.name}" for alias in tree.names}
        return names.union(*map(imported, ast.iter_child_nodes(tree)))

    return imported(ast.parse(source))
