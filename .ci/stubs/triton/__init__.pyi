# What is triton's has no type: its language, in which kernels are written, is not Python's type system. What the host
# functions around them do with tensors and numbers is checked like all other code.
from typing import Any

def __getattr__(name: str) -> Any: ...
