"""Checkpoints read part by part hold what was saved, whatever chunks they lie in."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from glm5_jax.config import RunConfig, tiny
from glm5_jax.errors import UserError
from glm5_jax.train import checkpoint_import, checkpoint_lazy
from glm5_jax.train.checkpoint import save_params_checkpoint
from glm5_jax.train.checkpoint_import import import_params_checkpoint
from glm5_jax.train.checkpoint_lazy import open_params_checkpoint, read_shape

CONFIG = RunConfig(name="lazy", model=tiny())


@pytest.fixture
def params():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
  return {
    "experts": normal(3, 4, 20, 12).astype(ml_dtypes.bfloat16),
    "odd": {"a": normal(7, 11), "b": normal(5)},
  }


@pytest.mark.parametrize("stored", ["in small chunks", "whole"])
def test_parts_make_up_what_was_saved(params, stored, monkeypatch, tmp_path):
  monkeypatch.setattr(checkpoint_import, "CHUNK_BYTES", 240)
  monkeypatch.setattr(checkpoint_lazy, "CHUNK_BYTES", 240)
  if stored == "whole":
    save_params_checkpoint(tmp_path, jax.tree.map(jnp.asarray, params), CONFIG)
  else:
    import_params_checkpoint(tmp_path, params, CONFIG)
  opened, config = open_params_checkpoint(tmp_path)
  assert config == CONFIG and jax.tree.structure(opened) == jax.tree.structure(params)
  for array, expected in zip(jax.tree.leaves(opened), jax.tree.leaves(params), strict=True):
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    found, seen = np.zeros_like(expected), np.zeros(expected.shape, int)
    for start, values in array.parts():
      here = tuple(slice(s, s + n) for s, n in zip(start, values.shape, strict=True))
      found[here] = values
      seen[here] += 1
      assert values.nbytes <= 240
    assert (seen == 1).all() and found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
  ("shape", "chunk", "itemsize", "expected"),
  [
    ((75, 256, 6144, 2048), (1, 1, 3072, 2048), 2, (1, 1, 3072, 2048)),  # as imported
    ((75, 256, 6144, 2048), (75, 4, 768, 2048), 2, (75, 4, 768, 2048)),  # as 512 devices saved it
    ((75, 6144), (75, 6144), 2, (75, 6144)),
    ((4096, 4096), (8, 512), 4, (1024, 4096)),
    ((5,), (5,), 4, (5,)),
    ((), (), 4, ()),
  ],
)
def test_small_chunks_are_read_together(shape, chunk, itemsize, expected):
  assert read_shape(shape, chunk, itemsize) == expected


def test_values_that_are_not_those_saved_are_named(params, tmp_path):
  save_params_checkpoint(tmp_path, jax.tree.map(jnp.asarray, params), CONFIG)
  opened, _ = open_params_checkpoint(tmp_path)
  opened["odd"]["a"]._checksum += 1
  list(opened["experts"].parts())
  with pytest.raises(UserError, match=r"/0 is damaged \(the values of params/odd/a are not those saved\)"):
    list(opened["odd"]["a"].parts())


def test_no_checkpoint(tmp_path):
  with pytest.raises(UserError, match="no complete checkpoint in"):
    open_params_checkpoint(tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_many_devices_is_exported_as_its_arrays_are(tmp_path, on_devices):
  """Chunks are then what the devices held."""
  code = f"""
from pathlib import Path
import jax
from glm5_jax import hf
from glm5_jax.config import MeshConfig, RunConfig, tiny
from glm5_jax.model import abstract_params, init_params, logical_axes
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.rules import param_shardings
from glm5_jax.train.checkpoint import save_params_checkpoint
from glm5_jax.train.checkpoint_lazy import open_params_checkpoint
folder = Path({str(tmp_path)!r})
cfg = tiny().replace(param_dtype="bfloat16")
mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=2, tensor=2))
params = init_params(cfg, jax.random.key(0))
shardings = param_shardings(mesh, logical_axes(cfg), abstract_params(cfg))
save_params_checkpoint(folder / "ours", jax.device_put(params, shardings), RunConfig(model=cfg))
opened, _ = open_params_checkpoint(folder / "ours")
experts = opened["layers_1"]["block_0"]["moe"]["experts"]["up_proj"]
print(experts.shape, experts._store.chunk_layout.read_chunk.shape)
hf.save_params(opened, cfg, folder / "parts")
hf.save_params(params, cfg, folder / "arrays")
"""
  assert on_devices(code).strip() == "(3, 8, 64, 32) (3, 4, 32, 16)"
  parts, arrays = (tmp_path / name / "model.safetensors" for name in ("parts", "arrays"))
  assert parts.read_bytes() == arrays.read_bytes()
