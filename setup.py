"""Packaging. `pip install -e .` is enough for every command on CPU; the extras add the rest."""

from setuptools import find_packages, setup

# Each floor is the version the tests run with on Python 3.11.
CORE = [
  "jax>=0.10.2",
  "flax>=0.12.8",
  "optax>=0.2.8",
  "chex>=0.1.92",
  "orbax-checkpoint>=0.12.8",
  "tensorstore>=0.1.86",
  "grain>=0.2.18",
  "array_record>=0.8.6",
  "sentencepiece>=0.2.3",
  "tokenizers>=0.23.3",
  "safetensors>=0.8.0",
  "ml_collections>=1.1.0",
  "absl-py>=2.5.1",
  "numpy>=2.4.6",
  "ml_dtypes>=0.6.0",
  "matplotlib>=3.11.2",
  "tqdm>=4.70.1",
  "tensorboardX>=2.6.5",
  "aiohttp>=3.14.5",
  "docker>=7.2.0",
]
EXTRAS = {
  "dev": [
    "pytest>=9.2.0",
    "pytest-xdist>=3.6",
    "hypothesis>=6.170.17",
    "ruff>=0.17.6,<0.18",  # a new minor version formats differently
    "mypy>=2.4.1",
    "import-linter>=2.17",
    # Compiles for TPU slices on a machine without one; there is none for other systems.
    "jax[tpu]>=0.10.2; sys_platform == 'linux' and platform_machine == 'x86_64'",
  ],
  # libtpu alone also compiles for TPU topologies ahead of time, on a machine without a TPU.
  "tpu": ["jax[tpu]>=0.10.2"],
  # The peers that benchmarks measure beside us.
  "bench": ["torch==2.13.0", "transformers==5.24.0"],
}
EXTRAS["all"] = [requirement for extra in EXTRAS.values() for requirement in extra]

setup(
  name="glm5-jax",
  version="0.1.0",
  description="GLM-5 in JAX: model, training and serving for research on TPU, GPU and CPU",
  python_requires=">=3.11",
  packages=find_packages(
    include=[
      pattern
      for room in ("glm5_jax", "pallas_kernels", "launch", "experiments", "envs")
      for pattern in (room, f"{room}.*")
    ]
  ),
  install_requires=CORE,
  extras_require=EXTRAS,
)
