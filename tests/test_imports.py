"""The house's imports: no files that import each other in a circle, also not over several others."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp


def circle(graph: grimp.ImportGraph) -> list[str]:
    """Modules of which each is imported by the next one.

    Imports inside functions count, for they hide a circle; those for types only do not: two objects may know each
    other. A package's __init__ is left out, which only names what its modules hold.
    """
    packages = {module for module in graph.modules if graph.find_children(module)}
    modules = graph.modules - packages
    try:
        TopologicalSorter(
            {each: graph.find_modules_directly_imported_by(each) - packages for each in modules}
        ).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("swarmcli", "coordinator_web", exclude_type_checking_imports=True, cache_dir=None)
    assert circle(graph) == []


def test_a_circle_would_be_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "d")]:
        graph.add_import(importer=importer, imported=imported)
    assert set(circle(graph)) == {"a", "b", "c"}
