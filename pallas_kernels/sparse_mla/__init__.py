"""Softmax attention over selected keys, a bit a key. See `api`."""

from pallas_kernels.sparse_mla.api import RESULT as RESULT
from pallas_kernels.sparse_mla.api import attend_bits as attend_bits
