"""The lightning indexer's scores, joined with the selection of the highest."""

from pallas_kernels.lightning_indexer.api import select as select
from pallas_kernels.lightning_indexer.api import select_indices as select_indices
from pallas_kernels.lightning_indexer.api import select_paged as select_paged
