"""Triton's interpreter, mended, and without what it does again at each call of a function inside of a kernel."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from triton import language
from triton.runtime import interpreter


def _call(function: Any, *given: Any, **named: Any) -> Any:
    """Call a function of a kernel. The kernel's launch has mostly put the interpreter's operations in place before."""
    if language.core.is_builtin(language.load) or language.core.is_builtin(language.core.load):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*given, **named)


interpreter.InterpretedFunction.__call__ = _call


sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from gpu.interpreter import mend_interpreter  # noqa: E402

mend_interpreter()
