"""Sizes that the Triton kernels take, for those who must know before there is a GPU; imports nothing.

The torch references, which run elsewhere and in fp64, have no such limits.
"""

MAX_HEAD_DIM = 128  # the backward tiles of a wider head do not fit the shared memory of any GPU
CELL_SIZES = (16, 32, 64, 128)  # tokens: one cell is one tile
MAX_TOP_K = 64  # the ranking keeps this many candidates of a query in registers
