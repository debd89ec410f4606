"""Muon and Muon Split on optax.contrib: which matrices, which arithmetic, which update size.

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
from optax.contrib import MuonDimensionNumbers, MuonState

from glm5_jax.config import ModelConfig
from glm5_jax.optim.rules import rules

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c
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
  dims: Any, momentum: float, ns_steps: int, ns_dtype: str, update_rms: float
) -> optax.GradientTransformation:
  """Gradients → orthogonalised updates of root mean square about `update_rms` (before the learning rate).

  Args:
    dims: MuonDimensionNumbers for every leaf of the updates.
    ns_dtype: arithmetic of the iteration. The momentum is kept in float32 whatever it is: optax runs
      the iteration in the dtype of its momentum, so it is handed a rounded copy.
  """
  inner = optax.contrib.scale_by_muon(
    # One row a step makes optax scan rather than unroll, which halves the compile time.
    ns_coeffs=(COEFFICIENTS,) * ns_steps,
    ns_steps=ns_steps,
    beta=momentum,
    eps=EPS,
    mu_dtype=jnp.float32,
    weight_dimension_numbers=dims,
  )

  def update(updates, state: MuonState, params=None):
    del params
    mu = optax.tree.update_moment(updates, state.mu, momentum, 1)
    rounded = state._replace(mu=optax.tree.cast(state.mu, ns_dtype))
    orthogonal, new_state = inner.update(optax.tree.cast(updates, ns_dtype), rounded)
    scaled = jax.tree.map(
      lambda x, dim: x.astype(jnp.float32) * (update_rms * math.sqrt(max(_matrix_shape(x, dim)))),
      orthogonal,
      dims,
    )
    return scaled, new_state._replace(mu=mu)

  return optax.GradientTransformation(inner.init, update)


def _matrix_shape(x: jax.Array, dims: MuonDimensionNumbers) -> tuple[int, int]:
  rows, cols = (math.prod(x.shape[axis] for axis in axes) for axes in dims)
  return rows, cols
