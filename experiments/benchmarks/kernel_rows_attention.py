"""The programs of the table of kernels that attend: to selected keys, beside jax's dense attention."""

import functools

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from experiments.benchmarks.kernel_row import Row
from pallas_kernels.indexer_loss import indexer_loss
from pallas_kernels.sparse_mla import attend_bits
from pallas_kernels.topk import bits

HEADS, WIDTH = 8, 256  # a group of GLM-5's 64 heads
SCALE = WIDTH**-0.5
QUERIES, KEYS = 512, 1024  # of a tile of ours


def _ours(q, k, v, words):
  return attend_bits(q, k, v, words, SCALE, "tpu")


@functools.cache
def _dense(length: int):
  sizes = splash.BlockSizes(
    block_q=1024, block_kv=1024, block_q_dkv=1024, block_kv_dkv=1024, block_kv_dkv_compute=512,
    block_q_dq=1024, block_kv_dq=1024,
  )  # fmt: skip
  mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * HEADS)
  return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def _splash(q, k, v, words):
  del words
  return jax.vmap(_dense(q.shape[2]))(q * SCALE, k, v)


def _with_gradients(attend):
  def run(q, k, v, words, grad):
    out, pull = jax.vjp(lambda *qkv: attend(*qkv, words), q, k, v)
    return out, pull(grad)

  return run


def rows_of(length: int) -> tuple[Row, ...]:
  """Forward, and forward with backward, of a causal row whose tiles below the diagonal are all occupied."""
  x = ((1, HEADS, length, WIDTH), "bfloat16")
  arguments = (x, x, x, ((1, length, bits.words(length)), "int32"))
  causal = HEADS * length**2 / 2 * WIDTH * 2.0  # of one product
  rows = []
  for what, products, wrap, more in (("", 2, lambda f: f, ()), (" and backward", 9, _with_gradients, (x,))):
    task = f"attention of {HEADS} heads × {WIDTH} to selected keys of {length:,}, forward{what}"
    note = "every tile below the diagonal has a selected key"
    rows += [
      Row(task, "ours", wrap(_ours), (*arguments, *more), flops=products * causal, note=note),
      Row(task, "dense, jax's splash", wrap(_splash), (*arguments, *more), flops=products * causal),
    ]
  return tuple(rows)


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
