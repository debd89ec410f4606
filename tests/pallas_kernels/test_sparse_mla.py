"""Attention over selected keys: every implementation against the plain formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import api, attend_bits, plan
from pallas_kernels.topk import bits

SCALE = 0.11


@pytest.fixture(params=api.RUN_ANYWHERE)
def implementation(request):
  return request.param


def operands(B, N, T, S, K=128, H=128, k=20, dtype="float32", seed=0, empty=3):
  """Random queries, keys, values and a selection of about k keys a query, the first `empty` without any."""
  rng = np.random.default_rng(seed)
  q, key, v, grad = (
    jnp.asarray(rng.standard_normal(shape), dtype)
    for shape in [(B, N, T, K), (B, N, S, K), (B, N, S, H), (B, N, T, H)]
  )
  mask = rng.random((B, T, S)) < k / S
  mask[:, :empty] = False
  return q, key, v, grad, mask


def exact(q, k, v, grad, mask):
  """(output, gradients of q, k, v) in float64."""
  q, k, v, grad = (np.asarray(x, np.float64) for x in (q, k, v, grad))
  logits = np.where(mask[:, None], np.einsum("bntk,bnsk->bnts", q, k) * SCALE, -np.inf)
  top = np.where(mask.any(-1)[:, None, :, None], logits.max(-1, keepdims=True), 0.0)
  weights = np.exp(logits - top)
  weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
  out = np.einsum("bnts,bnsh->bnth", weights, v)
  inner = np.sum(grad * out, axis=-1, keepdims=True)
  grad_logits = weights * (np.einsum("bnth,bnsh->bnts", grad, v) - inner) * SCALE
  return (
    out,
    np.einsum("bnts,bnsk->bntk", grad_logits, k),
    np.einsum("bnts,bntk->bnsk", grad_logits, q),
    np.einsum("bnts,bnth->bnsh", weights, grad),
  )


def found(implementation, q, k, v, grad, mask):
  words = bits.pack(jnp.asarray(mask))
  out, pull = jax.vjp(lambda *qkv: attend_bits(*qkv, words, SCALE, implementation), q, k, v)
  return out, *pull(grad)


SHAPES = {
  "one tile": dict(B=1, N=2, T=128, S=128),
  "no multiples": dict(B=2, N=1, T=200, S=300),
  "more than a chunk of words": dict(B=1, N=1, T=70, S=4500, k=30),
  "tiles of queries": dict(B=1, N=2, T=1100, S=1100, k=60),
  "wider values, fewer queries": dict(B=2, N=2, T=24, S=600, H=256),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_values_and_gradients(implementation, shape):
  arguments = operands(**shape)
  names = ("out", "q", "k", "v")
  for name, expected, ours in zip(names, exact(*arguments), found(implementation, *arguments), strict=True):
    np.testing.assert_allclose(ours, expected, atol=3e-6 * np.abs(expected).max(), rtol=0, err_msg=name)


def test_bfloat16(implementation):
  arguments = operands(1, 2, 150, 260, dtype="bfloat16")
  for expected, ours in zip(exact(*arguments), found(implementation, *arguments), strict=True):
    assert ours.dtype == "bfloat16"
    np.testing.assert_allclose(
      np.asarray(ours, np.float64), expected, atol=0.012 * np.abs(expected).max(), rtol=0
    )


def test_a_row_that_selects_nothing_is_0_with_gradient_0(implementation):
  q, k, v, grad, mask = operands(1, 1, 140, 150, empty=20)
  mask[:, :, 100:] = False  # and keys that nobody selects
  out, grad_q, grad_k, grad_v = map(np.asarray, found(implementation, q, k, v, grad, mask))
  assert not out[:, :, :20].any() and not grad_q[:, :, :20].any()
  assert not grad_k[:, :, 100:].any() and not grad_v[:, :, 100:].any()
  nothing = found(implementation, q, k, v, grad, np.zeros_like(mask))
  assert not any(np.asarray(x).any() for x in nothing)


def test_huge_logits(implementation):
  q, k, v, grad, mask = operands(1, 1, 130, 140)
  arguments = 30 * q, 30 * k, v, grad, mask
  for expected, ours in zip(exact(*arguments), found(implementation, *arguments), strict=True):
    np.testing.assert_allclose(ours, expected, atol=1e-3 * np.abs(expected).max(), rtol=0)


def test_every_key_selected_is_plain_attention(implementation):
  q, k, v, grad, mask = operands(1, 2, 160, 160)
  causal = np.broadcast_to(np.tril(np.ones((160, 160), bool)), mask.shape)
  out = found(implementation, q, k, v, grad, causal)[0]
  logits = jnp.where(causal[:, None], jnp.einsum("bntk,bnsk->bnts", q, k) * SCALE, -jnp.inf)
  plain = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(logits, -1), v)
  np.testing.assert_allclose(out, plain, atol=2e-6)


def test_walks_visit_the_occupied_tiles():
  mask = np.zeros((2, 512, 9000), bool)
  mask[0, 5, 100] = mask[0, 400, 8999] = mask[1, 511, 4096] = True
  meet = plan.occupied(bits.pack(jnp.asarray(mask)), queries=256, keys=1024)
  assert [tuple(map(int, at)) for at in np.argwhere(np.asarray(meet))] == [(0, 0, 0), (0, 1, 8), (1, 1, 4)]
  counts, others = plan.walk(meet)
  assert counts.tolist() == [1, 1, 0, 1]
  assert others.reshape(2, 2, -1)[..., 0].tolist() == [[0, 8], [0, 4]]
  counts, others = plan.walk(jnp.asarray([[[True, False, True, True]]]))
  assert counts.tolist() == [3] and others.tolist()[:3] == [0, 2, 3]


def test_no_race_between_cores(race_free):
  from pallas_kernels.sparse_mla import tpu

  q, k, v, grad, mask = operands(1, 2, 256, 256)
  words = bits.pack(jnp.asarray(mask))
  with race_free(cores=2) as interpret:
    out, pull = jax.vjp(lambda *qkv: tpu.attend_bits(*qkv, words, SCALE, interpret), q, k, v)
    jax.block_until_ready((out, pull(grad)))


@pytest.mark.parametrize(
  ("change", "said"),
  [
    (dict(implementation="fast"), "sparse_mla implementation 'fast' is unknown; known: reference"),
    (
      dict(q=jnp.zeros((1, 2, 8, 96)), k=jnp.zeros((1, 2, 16, 96))),
      "head widths by 128 are possible, got 96",
    ),
    (dict(v=jnp.zeros((1, 2, 16, 128), jnp.bfloat16)), "all float32 or all bfloat16"),
    (dict(k=jnp.zeros((1, 1, 16, 128))), "are needed, got"),
    (dict(words=jnp.zeros((1, 8, 256), jnp.int32)), r"bits int32 \(1, 8, 128\) are needed for 16 keys"),
  ],
)
def test_refused(change, said):
  given = dict(
    q=jnp.zeros((1, 2, 8, 128)),
    k=jnp.zeros((1, 2, 16, 128)),
    v=jnp.zeros((1, 2, 16, 128)),
    words=jnp.zeros((1, 8, 128), jnp.int32),
    implementation="tpu_interpret",
  )
  q, k, v, words, implementation = (given | change).values()
  with pytest.raises(ValueError, match=said):
    attend_bits(q, k, v, words, 1.0, implementation)


def test_what_the_kernels_do_not_take_falls_back():
  q, k, v, grad, mask = operands(1, 2, 20, 30, K=96, H=64)
  out = attend_bits(q, k, v, bits.pack(jnp.asarray(mask)), SCALE)
  np.testing.assert_allclose(out, exact(q, k, v, grad, mask)[0], atol=1e-6)
