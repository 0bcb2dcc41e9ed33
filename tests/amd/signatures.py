"""Recorded signatures of AMD's libraries, and a check of our calls against them.

signatures.json lists the parameters of each function: "name", "name=default", or "*name=default"
for keyword-only parameters. `python signatures.py LIBRARY FOLDER COMMIT` reads the listed functions
again from a checkout. It imports nothing from the checkout and copies only parameter lists.
"""

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "signatures.json"


@dataclass(frozen=True)
class Call:
    """A call in our sources of a recorded function."""

    target: str
    place: str
    positional: int
    keywords: tuple[str, ...]


def load() -> dict[str, inspect.Signature]:
    """Returns the recorded signatures by dotted name: methods without self, class constructors."""
    out = {}
    for library in json.loads(DATA.read_text())["libraries"].values():
        for name, parameters in library["functions"].items():
            out[name] = _signature(parameters)
    return out


def recorded_parameters(name: str) -> list[str]:
    libraries = json.loads(DATA.read_text())["libraries"].values()
    return next(f["functions"][name] for f in libraries if name in f["functions"])


def _signature(parameters: list[str]) -> inspect.Signature:
    out = []
    for text in parameters:
        name, has_default, default = text.lstrip("*").partition("=")
        out.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY
                if text.startswith("*")
                else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=default if has_default else inspect.Parameter.empty,
            )
        )
    return inspect.Signature(out)


def calls(path: Path, recorded: set[str]) -> Iterator[Call]:
    """Yields the calls in one of our files to functions that it imports from a recorded module.

    A method call counts if its name is recorded for a class that the file imports.
    """
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }
    methods: dict[str, list[str]] = {}
    for name in recorded:
        owner, _, method = name.rpartition(".")
        if owner in imported.values():
            methods.setdefault(method, []).append(name)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        targets: list[str] = []
        if isinstance(node.func, ast.Name):
            targets = [n for n in [imported.get(node.func.id)] if n in recorded]
        elif isinstance(node.func, ast.Attribute):
            targets = methods.get(node.func.attr, [])
        for target in targets:
            words = tuple(k.arg for k in node.keywords if k.arg)
            yield Call(target, f"{path.name}:{node.lineno}", len(node.args), words)


def problem(call: Call, signature: inspect.Signature) -> str | None:
    """Returns why the call does not fit the signature, or None if it fits."""
    try:
        signature.bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"{call.place}: {call.target}: {error}"
    return None


def unrecorded_imports(path: Path, recorded: set[str], packages: tuple[str, ...]) -> list[str]:
    """Returns the names that a file imports from ``packages`` and that are not recorded."""
    tree = ast.parse(path.read_text())
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages
        for alias in node.names
        if f"{node.module}.{alias.name}" not in recorded
    ]


def read(folder: Path, name: str) -> list[str] | None:
    """Returns the parameters of a dotted name in a checkout, or None if it has no such function."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        base = folder.joinpath(*parts[:depth])
        files = [f for f in (base.with_suffix(".py"), base / "__init__.py") if f.exists()]
        if files:
            return _in_file(files[0], parts[depth:])
    return None


def _in_file(source: Path, path: list[str]) -> list[str] | None:
    node: ast.AST = ast.parse(source.read_text())
    for part in path:
        named = (ast.FunctionDef, ast.ClassDef)
        children = [
            n for n in ast.iter_child_nodes(node) if isinstance(n, named) and n.name == part
        ]
        if not children:
            return None
        node = children[0]
    if isinstance(node, ast.ClassDef):
        return _in_file(source, [*path, "__init__"])
    assert isinstance(node, ast.FunctionDef)
    return _parameters(node.args)


def _parameters(arguments: ast.arguments) -> list[str]:
    plain = arguments.posonlyargs + arguments.args
    missing = [None] * (len(plain) - len(arguments.defaults))
    pairs = [(a.arg, d) for a, d in zip(plain, [*missing, *arguments.defaults], strict=True)]
    if pairs and pairs[0][0] == "self":
        pairs = pairs[1:]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    pairs += [(f"*{a.arg}", d) for a, d in named]
    return [name if d is None else f"{name}={ast.unparse(d)}" for name, d in pairs]


def record(library: str, folder: Path, commit: str) -> None:
    """Updates the recorded functions of one library in signatures.json from a checkout."""
    data = json.loads(DATA.read_text())
    facts = data["libraries"][library]
    facts["commit"] = commit
    for name in facts["functions"]:
        parameters = read(folder, name)
        if parameters is None:
            sys.exit(f"{folder} has no {name}")
        facts["functions"][name] = parameters
    DATA.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
