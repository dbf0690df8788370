"""The house's imports: no files that import each other in a circle, also not over several others."""

from __future__ import annotations

import grimp


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan 1972), each sorted.

    Imports inside functions count, for they hide a circle; those for types only do not: two objects may know each
    other. A package's __init__ is left out, which only names what its modules hold.
    """
    packages = {module for module in graph.modules if graph.find_children(module)}
    imports = {
        module: sorted(graph.find_modules_directly_imported_by(module) - packages)
        for module in sorted(graph.modules - packages)
    }
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in imports[module]:
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            members = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(members) > 1:
                found.append(sorted(members))

    for module in imports:
        if module not in number:
            visit(module)
    return found


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("swarmcli", "coordinator_web", exclude_type_checking_imports=True, cache_dir=None)
    assert circles(graph) == []


def test_a_circle_would_be_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "d")]:
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [["a", "b", "c"]]
