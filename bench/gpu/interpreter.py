"""Triton's interpreter with numpy 2.4 and later, which converts only arrays without dimensions to numbers.

The interpreter of Triton 3.6 holds a number as an array of one dimension. `--smoke` runs the kernels in it, also on
machines whose numpy is newer.
"""

import os
from typing import Any


def allow_new_numpy() -> None:
    """Convert the bounds of loops in kernels to numbers. Without the interpreter, nothing changes."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda one: int(one.handle.data.item()))

    interpreter._patch_lang_tensor = patched
