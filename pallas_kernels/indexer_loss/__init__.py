"""KL of the lightning indexer's scores to attention. See `api`."""

from pallas_kernels.indexer_loss.api import indexer_loss as indexer_loss
