"""Models from folders: each device reads its own part."""

import json

from tests.evals import runs
from tests.model.golden import FOLDER as HF_FOLDER


def test_every_device_has_its_part_of_a_run_and_of_a_hugging_face_folder(on_devices, tmp_path):
  run = runs.make_run(tmp_path / "run", runs.make_data(tmp_path / "data"), first_k_dense_replace=0)
  code = f"""
import json, math
import jax, numpy as np
from glm5_jax.config import MeshConfig
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.rules import param_shardings
from glm5_jax.serve.load import open_model
mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=2, tensor=2))
out = []
for folder in ({str(run)!r}, {str(HF_FOLDER)!r}):
  model = open_model(folder)
  shardings = param_shardings(mesh, logical_axes(model.cfg), abstract_params(model.cfg))
  whole, split = model.load_params(), model.load_params(shardings)
  equal = lambda a, b: a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
  same = jax.tree.map(lambda a, b, sharding: b.sharding == sharding and equal(a, b), whole, split, shardings)
  leaves = jax.tree.leaves(split)
  held = [sum(leaf.addressable_shards[i].data.nbytes for leaf in leaves) for i in range(8)]
  out.append([all(jax.tree.leaves(same)), max(held) / sum(leaf.nbytes for leaf in leaves)])
print(json.dumps(out))
"""
  for same, largest_share in json.loads(on_devices(code)):
    assert same and largest_share < 0.25  # an eighth, and more of the vectors and of what heads share
