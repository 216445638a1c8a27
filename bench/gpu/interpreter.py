"""Mends Triton's interpreter where it rounds otherwise than a GPU, and where it fails with numpy 2.4 and later.

`--smoke` and the tests run the kernels in it. The interpreter of Triton 3.6 holds a number as an array of one
dimension, and numpy 2.4 converts only arrays without dimensions to numbers. Converting to 8 bits, the interpreter makes
4 of 7.9, for example, because a number that is rounded up to the next power of 2 keeps its exponent.
"""

import os
from typing import Any

import torch


def mend_interpreter() -> None:
    """Convert the bounds of loops in kernels to numbers, and numbers to 8 bits as torch does.

    Without the interpreter, nothing changes.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton import language
    from triton.runtime import interpreter

    original, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    convert = builder.create_fp_to_fp
    types = {language.float8e4nv: torch.float8_e4m3fn, language.float8e5: torch.float8_e5m2}

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda one: int(one.handle.data.item()))

    def converted(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        if kind.scalar not in types or source.dtype.scalar is not language.float32:
            return convert(self, source, kind, rounding)
        numbers = torch.from_numpy(source.data).to(types[kind.scalar]).view(torch.uint8).numpy()
        return interpreter.TensorHandle(numbers, kind.scalar)

    interpreter._patch_lang_tensor, builder.create_fp_to_fp = patched, converted
