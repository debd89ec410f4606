"""The reference checkpoint of Hugging Face's GLM-5 and what it computed, for the tests of this folder.

A tiny random GlmMoeDsaForCausalLM written by transformers 5.24.0 (torch 2.13.0, CPU, float32): 4 layers
(1 dense), 32 index heads, index_topk 8 of 24 tokens, every norm weight and bias randomised.
"""

import functools
from pathlib import Path

import jax
import numpy as np

from glm5_jax import hf
from glm5_jax.config import ModelConfig
from glm5_jax.model import GLM5, ModelOutput

FOLDER = Path(__file__).parent.parent / "golden" / "hf_tiny"
LOGIT_TOLERANCE = 2e-5
# Many small programs run once each: compile them quickly rather than well.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@functools.cache
def config() -> ModelConfig:
  return hf.load_config(FOLDER)


@functools.cache
def reference() -> dict[str, np.ndarray]:
  with np.load(FOLDER / "reference.npz") as file:
    return dict(file)


@functools.cache
def gradients() -> dict[str, np.ndarray]:
  with np.load(FOLDER / "grads.npz") as file:
    return dict(file)


@functools.cache
def params(scan_layers: bool = False) -> dict:
  return hf.load_params(FOLDER, config().replace(scan_layers=scan_layers))


def tokens() -> np.ndarray:
  return reference()["input_ids"].astype(np.int32)


def forward(cfg: ModelConfig, tokens_BT: np.ndarray | None = None, **inputs) -> ModelOutput:
  """One compiled pass of the golden weights under `cfg`; traced afresh, so that patched code is seen."""
  run = jax.jit(lambda p, t, kw: GLM5(cfg).apply({"params": p}, t, **kw), compiler_options=FAST_COMPILE)
  return run(params(cfg.scan_layers), tokens() if tokens_BT is None else tokens_BT, inputs)


def distance(ours: jax.Array, theirs: np.ndarray) -> float:
  """Largest absolute difference."""
  return float(np.max(np.abs(np.asarray(ours, np.float64) - theirs)))
