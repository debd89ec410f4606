"""Attention over the keys that a selection marks. See `api`."""

from pallas_kernels.sparse_mla.api import RESULT as RESULT
from pallas_kernels.sparse_mla.api import attend_bits as attend_bits
