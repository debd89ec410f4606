"""The programs of the table of kernels that attend: to selected keys, beside jax's dense attention."""

import jax

from experiments.benchmarks.kernel_row import Row
from glm5_jax.model.attention import splash
from pallas_kernels.indexer_loss import indexer_loss
from pallas_kernels.sparse_mla import attend_bits, tiles
from pallas_kernels.topk import bits

HEADS, WIDTH = 64, 256
SCALE = WIDTH**-0.5


def _ours(q, k, v, words):
  return attend_bits(q, k, v, words, SCALE, "tpu")


def _splash(q, k, v, segments):
  return splash.attend_causal(q, k, v, segments, segments, SCALE)


def _with_gradients(attend):
  def run(q, k, v, mask, gradient):
    out, pull = jax.vjp(lambda *qkv: attend(*qkv, mask), q, k, v)
    return out, pull(gradient)

  return run


def rows_of(length: int) -> tuple[Row, ...]:
  """Forward, and forward with backward, of a causal row whose tiles below the diagonal are all occupied."""
  x = ((1, HEADS, length, WIDTH), "bfloat16")
  causal = HEADS * length**2 / 2 * WIDTH * 2.0  # of one product
  grids = tuple(
    (f"sparse_mla_{name}", float(HEADS * _causal_pairs(length, longer)))
    for name, longer in (("forward", "keys"), ("dq", "keys"), ("dkv", "queries"))
  )
  blocks = length // splash.BLOCK
  rows = []
  for what, products, wrap, more in (("", 2, lambda f: f, ()), (" and backward", 9, _with_gradients, (x,))):
    task = f"attention of {HEADS} heads × {WIDTH} to selected keys of {length:,}, forward{what}"
    flops = products * causal
    words, segments = ((1, length, bits.words(length)), "int32"), ((1, length), "int32")
    rows += [
      Row(
        task, "ours", wrap(_ours), (x, x, x, words, *more), flops=flops, grids=grids,
        note="every tile below the diagonal has a selected key",
      ),
      Row(
        task, "dense, jax's splash", wrap(_splash), (x, x, x, segments, *more), flops=flops,
        computed=(blocks + 1) / (2 * blocks), note="steps that it skips are taken for free",
      ),
    ]  # fmt: skip
  return tuple(rows)


def _causal_pairs(length: int, longer: str) -> int:
  tile = tiles.cut(length, length, longer)
  return sum(min(tile.key_tiles, -(-(i + 1) * tile.queries // tile.keys)) for i in range(tile.query_tiles))


LOSS_HEADS, LATENT, INDEX_HEADS, INDEX_WIDTH = 64, 576, 32, 128


def _loss(query, gate, key, q, k, words):
  def loss(query, gate, key):
    return indexer_loss(query, gate, key, q, k, words, SCALE, "tpu")

  return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(query, gate, key)


def loss_row(length: int) -> Row:
  """The indexer's loss and gradients of one causal row, over every key that is seen."""
  pairs = length**2 / 2
  flops = 2.0 * pairs * (2 * LOSS_HEADS * LATENT + 5 * INDEX_HEADS * INDEX_WIDTH)
  return Row(
    f"loss of an indexer with gradients, {LOSS_HEADS} heads of latents beside {INDEX_HEADS}, {length:,}",
    "ours",
    _loss,
    (
      ((1, length, INDEX_HEADS, INDEX_WIDTH), "bfloat16"),
      ((1, length, INDEX_HEADS), "float32"),
      ((1, length, INDEX_WIDTH), "bfloat16"),
      ((1, LOSS_HEADS, length, LATENT), "bfloat16"),
      ((1, length, LATENT), "bfloat16"),
      ((1, length, bits.words(length)), "int32"),
    ),
    flops=flops,
    note="two products with the main heads, five with the indexer's; all tiles below the diagonal count",
  )


ATTENTION = (*rows_of(32_768), *rows_of(131_072), loss_row(32_768))
