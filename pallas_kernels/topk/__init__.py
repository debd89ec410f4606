"""Exact, deterministic selection of the k largest of each row."""

from pallas_kernels.topk.api import topk as topk
from pallas_kernels.topk.api import topk_bits as topk_bits
from pallas_kernels.topk.api import topk_mask as topk_mask
