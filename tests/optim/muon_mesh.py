"""Optimiser steps on one device and on meshes of 8, and the collectives of the compiled programs, as JSON.

  JAX_NUM_CPU_DEVICES=8 python -m tests.optim.muon_mesh scanned fsdp=4,expert=2 context=2,fsdp=4 …

A difference is max|a − b| / max|a| over a leaf, the largest leaf named.
"""

import json
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from glm5_jax.config import MeshConfig, OptimConfig, RunConfig, tiny
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.optim import exchange
from glm5_jax.optim.groups import labels, make_optimizer
from glm5_jax.optim.guard import apply_or_skip
from glm5_jax.optim.muon_split import dimension_numbers, scale_by_muon_split
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.rules import param_specs
from glm5_jax.train.state import state_shardings

STEPS = 2
HEADS = ("q_b_proj", "k_b_proj", "v_b_proj")
COLLECTIVE = re.compile(r" = (.*?) (all-|reduce-scatter|collective-|ragged-)([\w-]*)\(")
SHAPE = re.compile(r"\b(pred|[a-z]+(\d+))\[([\d,]*)\]")


def run_config(scan_layers: bool) -> RunConfig:
  cfg = tiny().replace(scan_layers=scan_layers)
  plain = {"schedule": "constant", "peak_lr": 1e-2, "warmup_steps": 0, "clip_norm": 100.0}
  return RunConfig(model=cfg, optim=OptimConfig(**plain, ns_dtype="float32"))


def random_tree(cfg, seed: int, scale: float = 1.0) -> Any:
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: (rng.normal(size=x.shape) * scale).astype(np.float32), abstract_params(cfg))


def first_params(cfg) -> Any:
  """Smaller than an update, so that differences of updates show in the parameters."""
  return random_tree(cfg, 0, 1e-3)


def optimizer_of(run: RunConfig, mesh=None):
  return make_optimizer(run.optim, run.model, abstract_params(run.model), 10, mesh=mesh)


def compiled_step(run: RunConfig, mesh):
  """The optimiser's program on the mesh (norm, guard and clipping included), and the layouts it wants."""
  opt = optimizer_of(run, mesh)
  place = state_shardings(run, opt, mesh)
  shapes = abstract_params(run.model), jax.eval_shape(opt.init, abstract_params(run.model))
  params, state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, (place.params, place.opt_state)
  )

  def step(grads, state, params):
    applied = apply_or_skip(opt, grads, state, params, jnp.zeros(()))
    return applied.params, applied.opt_state, applied.grad_norm

  layouts = place.params, place.opt_state
  return jax.jit(step, out_shardings=(*layouts, None)).lower(params, state, params).compile(), layouts


def on_one_device(run: RunConfig, gradients: list[Any]) -> Any:
  opt, params = optimizer_of(run), first_params(run.model)
  step, state = jax.jit(lambda *args: apply_or_skip(opt, *args, jnp.zeros(()))), opt.init(params)
  for grads in gradients:
    params, state, _, norm, _ = step(grads, state, params)
  return jax.device_get((params, state, norm))


def on_mesh(run: RunConfig, gradients: list[Any], compiled, layouts) -> Any:
  params = jax.device_put(first_params(run.model), layouts[0])
  state = jax.device_put(optimizer_of(run).init(first_params(run.model)), layouts[1])
  for grads in gradients:
    params, state, norm = compiled(jax.device_put(grads, layouts[0]), state, params)
  return jax.device_get((params, state, norm))


def furthest(expected: Any, found: Any) -> tuple[float, str]:
  def apart(a, b):
    return float(np.abs(np.asarray(a, np.float64) - b).max() / (np.abs(a).max() or 1.0))

  pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
  return max((apart(a, b), jax.tree_util.keystr(path)) for (path, a), b in pairs)


def collectives(text: str) -> dict[str, list[int]]:
  """Bytes of every collective's result in a compiled program without loops around them, by kind."""
  found: dict[str, list[int]] = {}
  for shapes, kind, rest in COLLECTIVE.findall(text):
    size = sum(
      math.prod(int(n) for n in dims.split(",") if n) * int(bits or 8) // 8
      for _, bits, dims in SHAPE.findall(shapes)
    )
    found.setdefault(kind + rest, []).append(size)
  return found


def travellers(cfg, sizes: dict[str, int]) -> list[exchange.Layout]:
  """Muon's weights on such a mesh."""
  shapes = abstract_params(cfg)
  rows = zip(
    jax.tree.leaves(labels(shapes, cfg)),
    jax.tree.leaves(shapes),
    jax.tree.leaves(dimension_numbers(shapes, cfg), is_leaf=lambda x: x is None or hasattr(x, "output_axis")),
    jax.tree.leaves(param_specs(logical_axes(cfg))),
    strict=True,
  )
  return [exchange.layout(x.shape, dim, spec, sizes) for group, x, dim, spec in rows if group == "muon"]


def held_bytes(layouts: list[exchange.Layout]) -> int:
  """Float32 momentum on one device."""
  return sum(4 * math.prod(one.shape) for one in layouts)


def scale_one_head(gradients: Any) -> Any:
  def scaled(path, x):
    if path[-1].key not in HEADS:
      return x
    factor = np.ones((x.shape[-2], 1), np.float32)
    factor[2] = 1e-3
    return x * factor

  return jax.tree_util.tree_map_with_path(scaled, gradients)


def only_heads(params: Any) -> Any:
  named = jax.tree_util.tree_leaves_with_path(params)
  return {jax.tree_util.keystr(path): x for path, x in named if path[-1].key in HEADS}


def measure(scanned: bool, sizes: dict[str, int], gradients: list[Any], expected: Any) -> dict[str, Any]:
  run, mesh = run_config(scanned), make_mesh(MeshConfig(**({"data": 1} | sizes)))
  compiled, layouts = compiled_step(run, mesh)
  one_step, one_scaled = (
    only_heads(on_mesh(run, grads, compiled, layouts)[0])
    for grads in (gradients[:1], [scale_one_head(gradients[0])])
  )
  return {
    "apart": furthest(expected, on_mesh(run, gradients, compiled, layouts)),
    "apart_when_one_head_is_scaled": furthest(one_step, one_scaled),
    "collectives": collectives(compiled.as_text()),
    "counted": exchange.exchanged_bytes(travellers(run.model, sizes), "float32"),
  }


def of_whole_matrices() -> dict[str, list[int]]:
  """Collectives of Muon over weights whose matrices are whole under expert 8: experts, heads of k and v."""
  mesh, cfg = make_mesh(MeshConfig(data=1, expert=8)), tiny()

  def some(tree):
    block = tree["layers_1"]["block_0"]
    heads = {name: block["attn"][name] for name in ("k_b_proj", "v_b_proj")}
    return {"experts": block["moe"]["experts"], "heads": heads}

  dims, specs = some(dimension_numbers(abstract_params(cfg), cfg)), some(param_specs(logical_axes(cfg)))
  muon = scale_by_muon_split(dims, 0.95, 5, "bfloat16", 0.2, mesh, specs)
  placed = jax.tree.map(
    lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
    some(abstract_params(cfg)),
    specs,
  )
  return collectives(jax.jit(lambda x: muon.update(x, muon.init(x))).lower(placed).compile().as_text())


def main(kind: str, *meshes: str) -> dict[str, Any]:
  run = run_config(kind == "scanned")
  gradients = [random_tree(run.model, seed) for seed in range(1, 1 + STEPS)]
  expected = on_one_device(run, gradients)
  results = {}
  for mesh in meshes:
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}
    results[mesh] = measure(kind == "scanned", sizes, gradients, expected)
  return results | {"whole": of_whole_matrices()}


if __name__ == "__main__":
  print(json.dumps(main(*sys.argv[1:])))
