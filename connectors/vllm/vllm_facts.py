"""Reads facts about a vLLM from its Python files, without importing it: signatures, attributes, and calls of hooks.

The source may be a wheel, an unpacked wheel, or an installed package, also of a build for another machine.

A signature is a list of parameters as they are written in Python, without types: `["request", "count=", "*",
"deadline=", "**more"]`. `self` and `cls` are omitted.
"""

import ast
import inspect
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lmc.errors import InputError

Signature = list[str]
Function = ast.FunctionDef | ast.AsyncFunctionDef

# The names of a KV connector in vLLM's code. Connectors for other data have hooks with the same names.
OWNER = r"(?<!ec_)(?<!output_)(connector|connector_cls|kv_transfer_group|get_kv_transfer_group\(\)|CONNECTOR_AGENT)"
# Files of other connectors, which are skipped, because connectors call each other's methods with the same names.
OTHER_CONNECTORS = re.compile(r"/(kv_connector/v1/(?!(base|metrics)\.py)|ec_transfer/|kv_offload/|simple_kv_offload/)")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class HookCall:
    """A place where vLLM calls a hook of a connector."""

    hook: str
    file: str  # path relative to `vllm/`
    # The functions of this file from which the call is reached, without private functions that other functions call.
    functions: list[str]
    positional: int
    keywords: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """The facts about one version of vLLM that lmc's contract checks."""

    version: str
    functions: dict[str, Signature | None] = field(default_factory=dict)  # None for other objects than functions
    classes: dict[str, dict[str, Signature | None]] = field(default_factory=dict)  # None for data and properties
    abstract: list[str] = field(default_factory=list)  # methods that a connector has to implement
    calls: list[HookCall] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the facts as JSON, with one line for each signature."""
        return re.sub(r"\[[^][{}]*\]", lambda match: " ".join(match[0].split()), json.dumps(asdict(self), indent=1))


class Sources:
    """The Python files of the package `vllm` in a directory or in a wheel."""

    def __init__(self, path: Path) -> None:
        """Open a wheel or a directory. Raises `InputError` if `path` has no package `vllm`."""
        self._wheel = zipfile.ZipFile(path) if path.is_file() and zipfile.is_zipfile(path) else None
        self._root = path.parent if path.name == "vllm" and (path / "__init__.py").exists() else path
        if self._wheel is None and not (self._root / "vllm" / "__init__.py").exists():
            raise InputError(f"{path} has no package `vllm`: pass a wheel, or the directory that contains the package")
        self._modules: dict[str, ast.Module | None] = {}

    def files(self) -> list[str]:
        """Return the names of all Python files of vLLM."""
        if self._wheel:
            names = self._wheel.namelist()
        else:
            names = [path.relative_to(self._root).as_posix() for path in (self._root / "vllm").rglob("*.py")]
        return sorted(name for name in names if name.startswith("vllm/") and name.endswith(".py"))

    def read(self, file: str) -> str | None:
        """Return the text of a file; None if it does not exist."""
        try:
            if self._wheel:
                return self._wheel.read(file).decode()
            return (self._root / file).read_text()
        except (KeyError, OSError):
            return None

    def version(self) -> str:
        """Return vLLM's version, from the name of its metadata directory."""
        names = self._wheel.namelist() if self._wheel else [path.name for path in self._root.glob("vllm*.dist-info")]
        versions = [match[1] for name in names if (match := re.match(r"vllm(?:_cpu)?-([^-/]+)\.dist-info", name))]
        return versions[0] if versions else "of unknown version"

    def module(self, name: str) -> ast.Module | None:
        """Return a parsed module; None if it does not exist."""
        if name not in self._modules:
            path = name.replace(".", "/")
            text = self.read(f"{path}/__init__.py") or self.read(f"{path}.py")
            self._modules[name] = None if text is None else ast.parse(text)
        return self._modules[name]

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module that defines a name of a module, and the definition; imports are followed."""
        tree = self.module(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                if definition := self._imported(self._origin(module, node), node, name):
                    return definition
            elif name in _defined(node):
                return module, node
        return None

    def _imported(self, origin: str, node: ast.ImportFrom, name: str) -> tuple[str, ast.AST] | None:
        for alias in node.names if origin.startswith("vllm") else ():
            if alias.name == "*" or name == (alias.asname or alias.name):
                definition = self.find(origin, name if alias.name == "*" else alias.name)
                if definition:
                    return definition
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.read(f"{module.replace('.', '/')}/__init__.py") is not None
        parts = module.split(".") if is_package else module.split(".")[:-1]
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, node.module] if node.module else parts)

    def attributes(self, module: str, node: ast.ClassDef) -> dict[str, Signature | None]:
        """Return all attributes of a class, including those of its base classes in vLLM."""
        attributes: dict[str, Signature | None] = {}
        for parent in self._lineage(module, node):
            attributes |= own_attributes(parent)
        return attributes

    def constructor(self, module: str, node: ast.ClassDef) -> Signature:
        """Return the signature of a class: that of its `__init__`, or otherwise its fields as keywords (dataclass)."""
        lineage = self._lineage(module, node)
        for parent in reversed(lineage):
            if (signature := own_attributes(parent).get("__init__")) is not None:
                return signature
        fields = [inside for parent in lineage for inside in parent.body if isinstance(inside, ast.AnnAssign)]
        return ["*", *(ast.unparse(parent.target) + "=" * (parent.value is not None) for parent in fields)]

    def _lineage(self, module: str, node: ast.ClassDef) -> list[ast.ClassDef]:
        """Return the base classes of a class that are in vLLM, the most distant first, and the class itself."""
        parents = []
        for base in reversed(node.bases):
            name = ast.unparse(base).split("[")[0].rpartition(".")[2]
            if (parent := self.find(module, name)) and isinstance(parent[1], ast.ClassDef):
                parents += [ancestor for ancestor in self._lineage(parent[0], parent[1]) if ancestor not in parents]
        return [*parents, node]


def signature_of_arguments(arguments: ast.arguments, *, bound: bool) -> Signature:
    """Return the signature of a function; with `bound`, without its first parameter, as for a method."""
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    parts = [argument.arg + "=" * (place >= without) for place, argument in enumerate(positional)][bound:]
    if arguments.vararg:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parts += [argument.arg + "=" * (default is not None) for argument, default in defaults]
    return parts + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def signature_of(function: Any, *, bound: bool) -> Signature:
    """Return the signature of an imported function; with `bound`, without its first parameter."""
    parts: Signature = []
    kinds = inspect.Parameter
    for one in inspect.signature(function).parameters.values():
        if one.kind is kinds.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        stars = "*" * (one.kind is kinds.VAR_POSITIONAL) + "**" * (one.kind is kinds.VAR_KEYWORD)
        parts.append(stars + one.name + "=" * (one.default is not kinds.empty))
    return parts[bound:]


def accepts(signature: Signature, positional: int, keywords: Iterable[str]) -> bool:
    """Return whether a function accepts `positional` positional arguments and these keywords."""
    try:
        _signature(tuple(signature)).bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


@cache
def _signature(parts: tuple[str, ...]) -> inspect.Signature:
    kinds, parameters, after = inspect.Parameter, [], False
    kind: Any
    for part in parts:
        name = part.strip("*=")
        if part.startswith("**"):
            kind = kinds.VAR_KEYWORD
        elif part.startswith("*"):
            kind, after = kinds.VAR_POSITIONAL, True
        else:
            kind = kinds.KEYWORD_ONLY if after else kinds.POSITIONAL_OR_KEYWORD
        if name:
            parameters.append(kinds(name, kind, default=None if part.endswith("=") else kinds.empty))
    return inspect.Signature(parameters)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module that may run at import, including those under `if` and `try`."""
    for node in body:
        match node:
            case ast.If():
                if "TYPE_CHECKING" not in ast.unparse(node.test):
                    yield from _statements(node.body)
                yield from _statements(node.orelse)
            case ast.Try():
                yield from _statements([*node.body, *(line for handler in node.handlers for line in handler.body)])
            case _:
                yield node


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    return {one.id for one in _targets(node) if isinstance(one, ast.Name)}


def _decorators(node: Function) -> set[str]:
    return {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}


def own_attributes(node: ast.ClassDef) -> dict[str, Signature | None]:
    """Return the attributes that a class itself defines: signatures for methods, None for data and properties."""
    attributes: dict[str, Signature | None] = {}
    for inside in node.body:
        match inside:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                decorators = _decorators(inside)
                is_data = bool(decorators & {"property", "cached_property"})
                attributes[inside.name] = (
                    None if is_data else signature_of_arguments(inside.args, bound="staticmethod" not in decorators)
                )
                for target in (target for line in ast.walk(inside) for target in _targets(line)):
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        attributes.setdefault(target.attr, None)
            case ast.AnnAssign() | ast.Assign():
                attributes |= {target.id: None for target in _targets(inside) if isinstance(target, ast.Name)}
    return attributes


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets of an assignment; an empty list for other statements."""
    match node:
        case ast.Assign(targets=targets):
            return [
                element
                for target in targets
                for element in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
        case ast.AnnAssign(target=target):
            return [target]
    return []


def abstract_methods(node: ast.ClassDef) -> list[str]:
    """Return the methods of a class that its subclasses have to implement."""
    methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    return sorted(one.name for one in methods if "abstractmethod" in _decorators(one))


def hook_calls(sources: Sources, hooks: Iterable[str]) -> list[HookCall]:
    """Return the places where vLLM calls the hooks of a connector."""
    hooks, found = frozenset(hooks), set()
    called = re.compile(rf"{OWNER}\s*\.({'|'.join(sorted(hooks))})\(")
    for file in sources.files():
        if OTHER_CONNECTORS.search(file):
            continue
        text = sources.read(file) or ""
        if ("connector" in text and called.search(text)) or file.endswith("/v1/base.py"):
            for call in _File(file.removeprefix("vllm/"), ast.parse(text), hooks).calls():
                found.add((call.hook, call.file, tuple(call.functions), call.positional, tuple(call.keywords)))
    return [
        HookCall(hook=hook, file=file, functions=list(functions), positional=positional, keywords=list(keywords))
        for hook, file, functions, positional, keywords in sorted(found)
    ]


class _File:
    """The calls of hooks, and of the file's own functions, in one file."""

    def __init__(self, name: str, tree: ast.Module, hooks: frozenset[str]) -> None:
        self._name, self._hooks = name, hooks
        self._hooked: list[tuple[str, str, ast.Call]] = []  # function, hook
        self._called: dict[str, list[tuple[str, ast.Call]]] = {}  # name of a function -> its callers, with their calls
        self._walk(tree, ())

    def calls(self) -> Iterator[HookCall]:
        for function, hook, call in self._hooked:
            keywords = sorted(one.arg or "**" for one in call.keywords)
            yield HookCall(
                hook=hook, file=self._name, functions=self._reached(function, hook),
                positional=len(call.args), keywords=keywords,
            )  # fmt: skip

    def _walk(self, node: ast.AST, inside: tuple[str, ...]) -> None:
        for one in ast.iter_child_nodes(node):
            named = isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(one, ast.Call):
                self._note(one, ".".join(inside))
            self._walk(one, (*inside, one.name) if named else inside)  # type: ignore[attr-defined]

    def _note(self, call: ast.Call, function: str) -> None:
        match call.func:
            case ast.Attribute(value=owner, attr=name):
                who = ast.unparse(owner)
                if name in self._hooks and (
                    re.search(f"{OWNER}$", who) or (who == "self" and self._name.endswith("v1/base.py"))
                ):
                    self._hooked.append((function, name, call))
                if who in ("self", "cls") or who[:1].isupper():
                    self._called.setdefault(name, []).append((function, call))
            case ast.Name(id=name):
                self._called.setdefault(name, []).append((function, call))

    def _reached(self, function: str, hook: str) -> list[str]:
        """Return the functions from which a call is reached, without calls that disable the hook.

        A call disables the hook if it passes False for a keyword argument with the hook's name.
        """
        reached, new = {function}, [function]
        replaced = set()  # private functions, which are replaced by their callers
        while new:
            one = new.pop()
            callers = self._called.get(one.rpartition(".")[2], [])
            if callers and _is_private(one):
                replaced.add(one)
            for caller, call in callers:
                off = any(
                    word.arg == hook and isinstance(word.value, ast.Constant) and word.value.value is False
                    for word in call.keywords
                )
                if not off and caller not in reached:
                    reached.add(caller)
                    new.append(caller)
        return sorted(reached - replaced)


def _is_private(function: str) -> bool:
    name = function.rpartition(".")[2]
    return name.startswith("_") and not name.startswith("__")


def read_facts(
    sources: Sources, names: Iterable[str], fields: Mapping[str, Iterable[str]], base: str, hooks: Iterable[str]
) -> VllmFacts:
    """Read the facts about a vLLM.

    `names` are names with their modules, `fields` are attributes by class, and `hooks` are hooks of the class `base`.
    """
    functions: dict[str, Signature | None] = {}
    classes: dict[str, dict[str, Signature | None]] = {}
    abstract: list[str] = []
    for path in sorted({*names, *fields}):
        module, _, name = path.rpartition(".")
        match sources.find(module, name):
            case where, ast.ClassDef() as node:
                has = sources.attributes(where, node) | {"__init__": sources.constructor(where, node)}
                asked = {*fields.get(path, ()), *(hooks if path == base else ())}
                classes[path] = {one: has[one] for one in sorted(asked & has.keys())}
                abstract = abstract_methods(node) if path == base else abstract
            case _, (ast.FunctionDef() | ast.AsyncFunctionDef()) as function:
                functions[path] = signature_of_arguments(function.args, bound=False)
            case (_, _):
                functions[path] = None
    return VllmFacts(
        version=sources.version(), functions=functions, classes=classes, abstract=abstract,
        calls=hook_calls(sources, hooks),
    )  # fmt: skip
