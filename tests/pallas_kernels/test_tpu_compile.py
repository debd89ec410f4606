"""Every kernel through the real TPU compiler, for every generation, at the sizes it is made for."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.indexer_loss import indexer_loss
from pallas_kernels.lightning_indexer import select, select_indices, select_paged
from pallas_kernels.sparse_mla import attend_bits
from pallas_kernels.topk import topk, topk_mask

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='libtpu is not installed (pip install "glm5-jax[tpu]")'
  ),
]


def kernels(compiled) -> int:
  return compiled.as_text().count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize(
  ("shape", "k"), [((64, 131_072), 2048), ((8, 262_144), 4096), ((3, 37), 5), ((300, 2000), 16)]
)
def test_topk(compile_for, shape, k):
  compiled = compile_for(lambda x: topk(x, k, "tpu"), (shape, jnp.float32))
  assert kernels(compiled) == 3 and " sort(" not in compiled.as_text()
  compiled = compile_for(lambda x: topk(x, k, "tpu")[1], (shape, jnp.float32))
  assert kernels(compiled) == 2  # who wants no values pays for none
  assert kernels(compile_for(lambda x: topk_mask(x, k, "tpu"), (shape, jnp.float32))) == 2


def indexer_operands(B, T, S, dtype, heads=32):
  shapes = [((B, T, heads, 128), dtype), ((B, T, heads), "float32"), ((B, S, 128), dtype)]
  return *shapes, ((B, T), "int32"), ((B, T), "int32"), ((B, S), "int32")


@pytest.mark.parametrize(
  ("B", "T", "S", "dtype"),
  [(1, 131_072, 131_072, "bfloat16"), (2, 2048, 262_144, "bfloat16"), (1, 4096, 4096, "float32")],
)
def test_indexer(compile_for, B, T, S, dtype):
  """No score reaches memory: temporaries are the rearranged queries and their gates."""

  def call(query, gate, key, *rest):
    return select(query, gate, key, 2048, *rest, "tpu")

  compiled = compile_for(call, *indexer_operands(B, T, S, dtype))
  assert kernels(compiled) == 1 and " sort(" not in compiled.as_text()
  queries = B * T * 32 * 128 * (2 if dtype == "bfloat16" else 4)
  assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * queries + 2**24


@pytest.mark.parametrize(("N", "T", "S"), [(64, 8192, 8192), (8, 16_384, 131_072)])
def test_attention_to_selected_keys(compile_for, N, T, S):
  """Forward and backward; beside operands and results nothing as large as a head's logits."""

  def call(q, k, v, words, grad):
    out, pull = jax.vjp(lambda *qkv: attend_bits(*qkv, words, 0.0625, "tpu"), q, k, v)
    return out, pull(grad)

  query, key = ((1, N, T, 256), "bfloat16"), ((1, N, S, 256), "bfloat16")
  compiled = compile_for(call, query, key, key, ((1, T, S // 32), "int32"), query)
  assert kernels(compiled) == 3 and " sort(" not in compiled.as_text()
  words, statistics = T * S // 8, N * T * 4  # the words lie in memory a second time, transposed
  assert compiled.memory_analysis().temp_size_in_bytes < N * T * 256 * 2 + 2 * words + 6 * statistics


@pytest.mark.parametrize(("T", "S"), [(8192, 8192), (4096, 131_072)])
def test_loss_of_an_indexer(compile_for, T, S):
  """With gradients; nothing of the size of a distribution, [T, S], is in memory."""

  def call(query, gate, key, *rest):
    def loss(*index):
      return indexer_loss(*index, *rest, 0.0625, "tpu")

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(query, gate, key)

  compiled = compile_for(
    call,
    ((1, T, 32, 128), "bfloat16"),
    ((1, T, 32), "float32"),
    ((1, S, 128), "bfloat16"),
    ((1, 64, T, 576), "bfloat16"),
    ((1, S, 576), "bfloat16"),
    ((1, T, S // 32), "int32"),
  )
  assert kernels(compiled) == 2 and " sort(" not in compiled.as_text()
  queries = T * (32 * 128 * 6 + 64 * 640 * 2)  # rearranged, and gradients in float32
  assert compiled.memory_analysis().temp_size_in_bytes < 1.3 * queries + 5 * S * 128 * 4 + 2**25


def test_indexer_of_few_queries(compile_for):
  def call(query, gate, key, *rest):
    return select_indices(query, gate, key, 2048, *rest, "tpu")

  compiled = compile_for(call, *indexer_operands(8, 4, 32_768, "bfloat16"))
  assert kernels(compiled) == 2 and " sort(" not in compiled.as_text()


@pytest.mark.parametrize(("B", "T", "page"), [(64, 1, 64), (16, 4, 256), (2, 11, 16)])
def test_indexer_of_pages(compile_for, B, T, page):
  def call(*arguments):
    return select_paged(*arguments, 2048, "tpu")

  count = 131_072 // page
  compiled = compile_for(
    call,
    ((B, T, 32, 128), "bfloat16"),
    ((B, T, 32), "float32"),
    ((B * count, page, 128), "bfloat16"),
    ((B, count), "int32"),
    ((B, T), "int32"),
  )
  assert kernels(compiled) == 2 and " sort(" not in compiled.as_text()


@pytest.mark.parametrize(
  ("rows", "width_in", "width_out", "groups", "dtype"),
  [
    (32_768, 6144, 4096, 8, "bfloat16"),  # GLM-5's experts: gate and up, then down
    (32_768, 2048, 6144, 8, "bfloat16"),
    (8192, 6144, 4096, 256, "bfloat16"),
    (4096, 6144, 2048, 8, "float32"),
    (1008, 16_384, 1024, 3, "bfloat16"),
    (37, 7, 129, 5, "float32"),
    (1, 100, 96, 1, "bfloat16"),
  ],
)
def test_grouped_matmul(compile_for, rows, width_in, width_out, groups, dtype):
  """Forward and both gradients: a kernel each, and no matrix is copied or held in another form."""

  def call(x, w, sizes, grad):
    out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, "tpu"), x, w)
    return out, *pull(grad)

  compiled = compile_for(
    call,
    ((rows, width_in), dtype),
    ((groups, width_in, width_out), dtype),
    ((groups,), "int32"),
    ((rows, width_out), dtype),
  )
  assert kernels(compiled) == 3
  matrices = groups * width_in * width_out * jnp.dtype(dtype).itemsize
  assert compiled.memory_analysis().temp_size_in_bytes < max(matrices // 8, 2**20)
