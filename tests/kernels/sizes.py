"""How large the kernel tests are.

`TRIVET_KERNEL_SIZES=small` is for memory checkers, under which a kernel takes some hundred times as long: the same
kernels and the same paths through them, in fewer and smaller calls.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def sized(usual: T, small: T) -> T:
    return small if os.environ.get("TRIVET_KERNEL_SIZES") == "small" else usual
