"""Attention kinds by the letter that a config's `attention` pattern uses.

A new kind is one file with a module `Kind(cfg, owns_indexer)` whose call is
`(x_BTD, ctx, selection, cache) -> AttentionOutput`, and one line here.
"""

from glm5_jax.model.attention.dsa import SparseAttention
from glm5_jax.model.attention.mla import FullAttention
from glm5_jax.model.attention.sliding import SlidingAttention

ATTENTION = {
  "D": SparseAttention,  # DeepSeek sparse attention: lightning indexer + selected keys
  "F": FullAttention,  # plain MLA over all keys
  "S": SlidingAttention,  # MLA over the last `sliding_window` keys
}
