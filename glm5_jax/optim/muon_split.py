"""Muon and Muon Split: which matrices, which arithmetic, which update size.

Formula (Moonlight, arXiv 2502.16982; per head: GLM-5 report §2):
  m ← β m + (1 − β) g;  u = β m̂ + (1 − β) ĝ (Nesterov, m̂ and ĝ bias-corrected as optax does);
  X = u / (‖u‖_F + ε), n times X ← a X + (b A + c A²) X with A = X Xᵀ;
  step = lr · rms · sqrt(max(rows, cols)) · X.
Moonlight's momentum is m ← β m + g without bias correction. X is the same for any scaling of u, so the two
differ only in the weight of the newest gradient against m, and only in the first steps.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from optax.contrib import MuonDimensionNumbers, MuonState

from glm5_jax.config import ModelConfig
from glm5_jax.optim import exchange
from glm5_jax.optim.rules import rules

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c
CHUNK_BYTES = 2**28  # of matrices iterated on at a time; temporaries are a few times as much
EPS = 1e-7  # added to the Frobenius norm; a zero gradient (an expert no token chose) gives a zero update


def dimension_numbers(params: Any, cfg: ModelConfig, split: bool = True) -> Any:
  """A tree like `params` of MuonDimensionNumbers, None where AdamW or nobody trains the parameter.

  Args:
    params: arrays or ShapeDtypeStructs.
    cfg: says which segments carry a leading axis of stacked layers.
    split: True: q_b_proj, k_b_proj and v_b_proj head by head. False: each over all heads as one matrix.

  Raises:
    UserError: a parameter that no rule names.
  """
  return jax.tree.map(lambda rule: rule.split if split else rule.whole, rules(params, cfg))


def scale_by_muon_split(
  dims: Any,
  momentum: float,
  ns_steps: int,
  ns_dtype: str,
  update_rms: float,
  mesh: Mesh | None = None,
  specs: Any = None,
) -> optax.GradientTransformation:
  """Gradients → orthogonalised updates of root mean square about `update_rms` (before the learning rate).

  Args:
    dims: MuonDimensionNumbers for every leaf of the updates.
    ns_dtype: arithmetic of the iteration, and what travels on a mesh. The momentum is kept in float32.
    mesh, specs: how the leaves are split (a tree of PartitionSpecs); see `exchange` for what travels then.
  """

  def init(params) -> MuonState:
    mu = optax.tree.zeros_like(params, dtype=jnp.float32)
    return MuonState(jnp.zeros([], jnp.int32), mu, jnp.asarray((COEFFICIENTS,) * ns_steps))

  def update(updates, state: MuonState, params=None):
    del params
    # Without it the compiler may cast the momentum before the backward pass, and keep both for all of it.
    updates, state = jax.lax.optimization_barrier((updates, state))
    mu = optax.tree.update_moment(updates, state.mu, momentum, 1)
    count = optax.safe_increment(state.count)
    low_mu, low_updates = optax.tree.cast(state.mu, ns_dtype), optax.tree.cast(updates, ns_dtype)
    ahead, structure = jax.tree.flatten(_lookahead(low_mu, low_updates, momentum, count))
    orthogonal = exchange.map_matrices(
      lambda x: _newton_schulz(x, state.ns_coeffs),
      ahead,
      jax.tree.leaves(dims, is_leaf=lambda dim: isinstance(dim, MuonDimensionNumbers)),
      mesh,
      jax.tree.leaves(specs),
    )
    scaled = jax.tree.map(
      lambda x, dim: x.astype(jnp.float32) * (update_rms * math.sqrt(max(_matrix_shape(x, dim)))),
      jax.tree.unflatten(structure, orthogonal),
      dims,
    )
    return scaled, MuonState(count, mu, state.ns_coeffs)

  return optax.GradientTransformation(init, update)


def _lookahead(mu: Any, updates: Any, momentum: float, count: jax.Array) -> Any:
  """Nesterov's u at the update of this number, from the momentum before it."""
  mu = optax.tree.update_moment(updates, mu, momentum, 1)
  return jax.tree.map(
    lambda m, g: momentum * m + (1 - momentum) * g,
    optax.tree.bias_correction(mu, momentum, optax.safe_increment(count)),
    optax.tree.bias_correction(updates, momentum, count),
  )


def _newton_schulz(x: jax.Array, coefficients: jax.Array) -> jax.Array:
  """Each matrix of [n, rows, cols], rows ≤ cols, with its singular values near 1; in the dtype of x.

  Args:
    coefficients: [steps, 3], a, b, c of each step.
  """
  coefficients = coefficients.astype(x.dtype)

  def one(matrix: jax.Array) -> jax.Array:
    matrix /= jnp.linalg.norm(matrix) + EPS
    return jax.lax.scan(step, matrix, coefficients)[0]  # a scan compiles twice as fast as five steps unrolled

  def step(x: jax.Array, abc: jax.Array) -> tuple[jax.Array, None]:
    square = x @ x.T
    polynomial = abc[1] * square + abc[2] * square @ square
    return abc[0] * x + polynomial @ x, None

  fitting = max(1, CHUNK_BYTES // (x[0].size * x.dtype.itemsize))
  if x.shape[0] <= fitting:
    return jax.vmap(one)(x)
  # A divisor leaves no rest, which would be compiled a second time.
  at_a_time = next(n for n in range(fitting, 0, -1) if x.shape[0] % n == 0)
  return jax.lax.map(one, x, batch_size=at_a_time)


def _matrix_shape(x: jax.Array, dims: MuonDimensionNumbers) -> tuple[int, int]:
  rows, cols = (math.prod(x.shape[axis] for axis in axes) for axes in dims)
  return rows, cols
