"""Runs a Python program within this process as `python` itself would."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
from types import CodeType, ModuleType


def run_program() -> None:
    """Executes the program in a new `__main__`, which lasts as long as the process.

    `runpy` would take its `__main__` away again before exit handlers and threads are done.
    """
    main_module = ModuleType("__main__")
    kind = sys.argv[0]
    if kind == "-c":
        code = prepare_code(main_module)
    elif kind == "-m":
        code = prepare_module(main_module)
    else:
        code = prepare_script(main_module)
    exec(code, vars(main_module))


def install(module: ModuleType) -> None:
    """Makes a module `__main__`, with what the interpreter would have put into it."""
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module


def set_first_path(directory: str) -> None:
    """Replaces the directory of this file, unless `python -I` or `-P` has left it out."""
    if not is_path_safe():
        sys.path[0] = directory


def is_path_safe() -> bool:
    """Whether `sys.path` begins with the library, not with a directory of the program."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def prepare_code(module: ModuleType) -> CodeType:
    """`-c code`."""
    source = sys.argv.pop(1)
    set_first_path("")
    install(module)
    return compile(source, "<string>", "exec", dont_inherit=True)


def prepare_module(module: ModuleType) -> CodeType:
    """`-m module`; a package means its `__main__`."""
    name = sys.argv.pop(1)
    set_first_path(os.getcwd())
    install(module)
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = describe(module, spec)
    if code is None:
        sys.exit(f"{sys.executable}: No module named {name}, or it cannot be run")
    sys.argv[0] = module.__file__ or name
    return code


def prepare_script(module: ModuleType) -> CodeType:
    """A file, or a directory or zip archive with a `__main__.py`."""
    path = os.path.join(os.getcwd(), sys.argv[0])
    finder = pkgutil.get_importer(path)
    if finder is not None:
        sys.path[: 0 if is_path_safe() else 1] = [path]
        code = describe(module, finder.find_spec("__main__"))
        install(module)
        if code is None:
            sys.exit(f"{sys.executable}: can't find '__main__' module in {path!r}")
        return code
    set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module.__file__, module.__loader__, module.__spec__ = path, loader, None
    install(module)
    return compile(loader.get_data(path), path, "exec", dont_inherit=True)


def describe(module: ModuleType, spec: importlib.machinery.ModuleSpec | None) -> CodeType | None:
    """Sets the module's attributes from a spec and returns its code, None if it has none."""
    if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
        return None
    module.__file__, module.__loader__, module.__spec__ = spec.origin, spec.loader, spec
    module.__package__ = spec.parent
    code: CodeType | None = spec.loader.get_code(spec.name)
    return code
