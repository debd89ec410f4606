"""Rows sorted by group, each group times a matrix of its own."""

from pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from pallas_kernels.grouped_matmul.api import row_alignment as row_alignment
