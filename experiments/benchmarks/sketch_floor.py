"""The floor: the shape of `config.bench_6m` in plain jax, one file. Prints JSON. Not a model to copy.

It leaves out what a product needs (packed documents, MTP, checkpoints, numerics other than float32,
parity with a reference), so what it reaches should cost the real model nothing.

  python -m experiments.benchmarks.sketch_floor
"""

import argparse
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax

# Names as in the dimension key of glm5_jax.model; FE and FD are the widths of an expert and the dense MLP.
D, V, LAYERS, N, Q, C, P, R, H = 256, 4096, 4, 4, 96, 64, 48, 16, 64
E, TOPK, FE, FD, I, J, SELECT, BLOCK = 8, 2, 128, 512, 16, 32, 128, 128
ROWS, LENGTH = 8, 512
SCALE = (P + R) ** -0.5


def init(key):
  keys = iter(jax.random.split(key, 100))

  def weight(*shape):
    return jax.random.normal(next(keys), shape) * 0.02

  def layer(dense: bool):
    p = dict(qa=weight(D, Q), qb=weight(Q, N, P + R), kva=weight(D, C + R), uk=weight(C, N, P))
    p |= dict(uv=weight(C, N, H), o=weight(N, H, D), iq=weight(Q, I, J), ik=weight(D, J), iw=weight(D, I))
    if dense:
      return p | dict(g=weight(D, FD), u=weight(D, FD), d=weight(FD, D))
    p |= dict(r=weight(D, E), g=weight(E, D, FE), u=weight(E, D, FE), d=weight(E, FE, D))
    return p | dict(sg=weight(D, FE), su=weight(D, FE), sd=weight(FE, D))

  return dict(embed=weight(V, D), head=weight(D, V), layers=[layer(i == 0) for i in range(LAYERS)])


def rms(x):
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def rotate(x, positions):
  """Interleaved rope on the last axis of x, [B, T, …]."""
  angle = positions[:, None] * 1e6 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
  angle = angle.reshape((1, positions.size) + (1,) * (x.ndim - 3) + (-1,))
  a, b = x[..., ::2], x[..., 1::2]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


def selected(score, k):
  """Mask of each row's k largest: 32 counted halvings over order-preserving int32 keys (ties all kept)."""
  bits = jax.lax.bitcast_convert_type(score, jnp.int32)
  keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

  def halve(i, low):
    trial = jnp.where(i == 0, 0, low + (jnp.int32(1) << (31 - i)))
    return jnp.where((keys >= trial[..., None]).sum(-1) >= k, trial, low)

  low = jax.lax.fori_loop(0, 32, halve, jnp.full(score.shape[:-1], -(2**31), jnp.int32))
  return keys >= low[..., None]


def swiglu(x, gate, up, down):
  return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def experts_sorted(p, x_MD):
  """Tokens sorted by expert and padded to whole blocks: one batched matmul, for many tokens."""
  m = x_MD.shape[0]
  value, choice = jax.lax.top_k(jax.nn.sigmoid(x_MD @ p["r"]), TOPK)
  weight = value / value.sum(-1, keepdims=True) * 2.5
  flat = choice.reshape(-1)
  order = jnp.argsort(flat, stable=True)
  count = jnp.bincount(flat, length=E)
  padded = (count + BLOCK - 1) // BLOCK * BLOCK
  rank = jnp.arange(m * TOPK) - (jnp.cumsum(count) - count)[flat[order]]
  slot = (jnp.cumsum(padded) - padded)[flat[order]] + rank
  blocks = m * TOPK // BLOCK + E
  rows = jnp.zeros((blocks * BLOCK, D)).at[slot].set(x_MD[order // TOPK], unique_indices=True)
  rows = rows.reshape(blocks, BLOCK, D)
  owner = jnp.searchsorted(jnp.cumsum(padded), jnp.arange(blocks) * BLOCK, side="right").clip(0, E - 1)
  out = swiglu(rows, p["g"][owner], p["u"][owner], p["d"][owner]).reshape(-1, D)
  back = jnp.zeros(m * TOPK, jnp.int32).at[order].set(slot)
  return (out[back].reshape(m, TOPK, D) * weight[..., None]).sum(1)


def experts_dense(p, x_MD):
  """Every expert sees every token: cheapest for a handful of tokens."""
  value, choice = jax.lax.top_k(jax.nn.sigmoid(x_MD @ p["r"]), TOPK)
  weight = (
    jnp.zeros((x_MD.shape[0], E))
    .at[jnp.arange(x_MD.shape[0])[:, None], choice]
    .set(value / value.sum(-1, keepdims=True) * 2.5)
  )
  h = jax.nn.silu(jnp.einsum("md,edf->emf", x_MD, p["g"])) * jnp.einsum("md,edf->emf", x_MD, p["u"])
  return jnp.einsum("emf,efd,me->md", h, p["d"], weight)


def feed_forward(p, x, experts):
  if "r" not in p:
    return swiglu(x, p["g"], p["u"], p["d"])
  return experts(p, x.reshape(-1, D)).reshape(x.shape) + swiglu(x, p["sg"], p["su"], p["sd"])


def attention(p, h, positions, causal):
  """Expanded MLA under the mask of the indexer's exact selection; the indexer gets no gradient."""
  qr, kv = rms(h @ p["qa"]), h @ p["kva"]
  q = jnp.einsum("btq,qnp->btnp", qr, p["qb"])
  q = jnp.concatenate([q[..., :P], rotate(q[..., P:], positions)], -1)
  c, k_rope = rms(kv[..., :C]), rotate(kv[..., C:], positions)
  k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k_rope.shape[:2], N, R))
  k = jnp.concatenate([jnp.einsum("btc,cnp->btnp", c, p["uk"]), k_rope], -1)

  indexer = (jnp.einsum("btq,qij->btij", qr, p["iq"]), h @ p["ik"], h @ p["iw"])
  score = jax.lax.map(
    lambda a: jnp.einsum("its,ti->ts", jax.nn.relu(jnp.einsum("tij,sj->its", a[0], a[1])), a[2]),
    jax.lax.stop_gradient(indexer),
  )
  mask = selected(jnp.where(causal, score, -jnp.inf), SELECT) & causal
  logit = jnp.einsum("btnp,bsnp->bnts", q, k) * SCALE
  a = jax.nn.softmax(jnp.where(mask[:, None], logit, -1e30), -1)
  o = jnp.einsum("bnts,bsnh->btnh", a, jnp.einsum("btc,cnh->btnh", c, p["uv"]))
  return jnp.einsum("btnh,nhd->btd", o, p["o"])


def forward(params, tokens_BT):
  positions = jnp.arange(tokens_BT.shape[1])
  causal = positions[:, None] >= positions[None]
  x = params["embed"][tokens_BT]
  for p in params["layers"]:
    x = x + attention(p, rms(x), positions, causal)
    x = x + feed_forward(p, rms(x), experts_sorted)
  return rms(x) @ params["head"]


def decode_step(params, cache, token_B, position, length):
  """One token a sequence against the latent cache, absorbed form, layers unrolled."""
  x, new = params["embed"][token_B], []
  for p, (latent, index_keys) in zip(params["layers"], cache, strict=True):
    h = rms(x)
    qr = rms(h @ p["qa"])
    q = jnp.einsum("bq,qnp->bnp", qr, p["qb"])
    latent = jax.lax.dynamic_update_slice(latent, (h @ p["kva"])[:, None], (0, position, 0))
    index_keys = jax.lax.dynamic_update_slice(index_keys, (h @ p["ik"])[:, None], (0, position, 0))
    score = jnp.einsum("bij,bsj->bis", jnp.einsum("bq,qij->bij", qr, p["iq"]), index_keys)
    score = jnp.einsum("bis,bi->bs", jax.nn.relu(score), h @ p["iw"])
    kept = jnp.where(jnp.arange(length) <= position, score, -jnp.inf)
    keys = latent
    if length > SELECT:
      kept, index = jax.lax.top_k(kept, SELECT)
      keys = jnp.take_along_axis(latent, index[..., None], 1)
    q = jnp.concatenate([jnp.einsum("bnp,cnp->bnc", q[..., :P], p["uk"]), q[..., P:]], -1)
    logit = jnp.einsum("bnc,bsc->bns", q, keys) * SCALE
    a = jax.nn.softmax(jnp.where(kept[:, None] > -jnp.inf, logit, -1e30), -1)
    o = jnp.einsum("bnc,cnh->bnh", jnp.einsum("bns,bsc->bnc", a, keys[..., :C]), p["uv"])
    x = x + jnp.einsum("bnh,nhd->bd", o, p["o"])
    x = x + feed_forward(p, rms(x), experts_dense)
    new.append((latent, index_keys))
  return new, jnp.argmax(rms(x) @ params["head"], -1)


def time_training(steps: int) -> dict:
  """Median step of AdamW on random tokens; compiling (and the first step) apart."""
  params = init(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, V)
  opt = optax.adamw(1e-3)
  opt_state = opt.init(params)

  def loss_of(p, t):
    return optax.softmax_cross_entropy_with_integer_labels(forward(p, t)[:, :-1], t[:, 1:]).mean()

  @jax.jit
  def step(p, s, t):
    loss, grad = jax.value_and_grad(loss_of)(p, t)
    update, s = opt.update(grad, s, p)
    return optax.apply_updates(p, update), s, loss

  seconds = []
  for _ in range(steps + 1):
    start = time.perf_counter()
    params, opt_state, loss = step(params, opt_state, tokens)
    loss.block_until_ready()
    seconds.append(time.perf_counter() - start)
  median = statistics.median(seconds[1:])
  return {
    "train_tokens_per_s": ROWS * LENGTH / median,
    "train_step_s": median,
    "compile_s": seconds[0] - median,
    "loss": float(loss),
  }


def time_decode(batch: int, length: int, repeats: int) -> float:
  """Best milliseconds of a decode step over `repeats` runs of 64 steps that end at `length` tokens."""
  params = init(jax.random.key(0))
  step = jax.jit(lambda p, c, t, at: decode_step(p, c, t, at, length), donate_argnums=1)
  cache = [(jnp.zeros((batch, length, C + R)), jnp.zeros((batch, length, J))) for _ in range(LAYERS)]
  cache, token_B = step(params, cache, jnp.zeros(batch, int), jnp.int32(0))
  best = float("inf")
  for _ in range(repeats):
    start = time.perf_counter()
    for i in range(64):
      cache, token_B = step(params, cache, token_B, jnp.int32(length - 64 + i))
      token_B[0].item()
    best = min(best, (time.perf_counter() - start) / 64)
  return best * 1e3


def matmul_gflops(size: int = 2048, repeats: int = 10) -> float:
  """The machine's own float32 rate, a plain square matmul."""
  a = jnp.ones((size, size))
  multiply = jax.jit(lambda a: a @ a)
  multiply(a).block_until_ready()
  start = time.perf_counter()
  for _ in range(repeats):
    multiply(a).block_until_ready()
  return repeats * 2 * size**3 / (time.perf_counter() - start) / 1e9


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=int, default=5, help="timed training steps")
  parser.add_argument("--repeats", type=int, default=3, help="timed decoding runs of 64 steps")
  args = parser.parse_args(argv)

  result = {"matmul_gflops": matmul_gflops()} | time_training(args.steps)
  for batch in (1, 8):
    result[f"decode_{batch}_ms"] = time_decode(batch, 128, args.repeats)
  print(json.dumps(result))


if __name__ == "__main__":
  main(sys.argv[1:])
