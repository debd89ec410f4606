"""The same numbers on every mesh: choices, gradients, three optimiser steps, metrics."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

TOLERANCE = 1e-5  # of a leaf's largest value, everything in float32
FAST = ("expert=2,context=2,data=2", "fsdp=2,tensor=2,expert=2,accum=2,tilted=1")
SPLASH_HEADS = "qk_nope_head_dim=64,qk_rope_head_dim=64,v_head_dim=128"
SLOW = (
  *("data=8", "fsdp=8", "expert=8", "context=4", "tensor=4"),
  *("fsdp=4,expert=2,accum=4,rows=32", "fsdp=4,tensor=2", "data=2,context=4,tilted=1", "expert=4,context=2"),
  *(
    "fsdp=2,context=2,tensor=2,num_hidden_layers=4",
    "expert=2,tensor=2,num_hidden_layers=5,index_topk_freq=2",
  ),
  'data=2,expert=2,attention="F"',
  *("data=4,dcn_data=2,fsdp=2", "data=2,dcn_data=2,fsdp=4,dcn_fsdp=2"),  # two and four slices
  f'context=2,rows=2,length=512,attention="F",attention_implementation="splash_interpret",{SPLASH_HEADS}',
  f'context=2,rows=2,length=256,dsa_implementation="tpu_interpret",index_head_dim=128,{SPLASH_HEADS}',
)


def run(cases: tuple[str, ...], timeout: int) -> dict:
  """One process with 8 devices computes all cases; programs that run thrice are not worth optimising."""
  environment = {"JAX_NUM_CPU_DEVICES": "8", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
  done = subprocess.run(
    [sys.executable, "-m", "tests.parallel.mesh_equality", *cases],
    cwd=ROOT,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=timeout,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout)


def check(result: dict) -> None:
  assert result["choices"] and result["sets"]  # selected keys and experts, to the last one
  for name in ("gradients", "params", "moments", "metrics"):
    distance, where = result[name]
    assert distance < TOLERANCE, (name, where)


@pytest.fixture(scope="module")
def fast():
  return run(FAST, 900)


@pytest.fixture(scope="module")
def slow():
  return run(SLOW, 3000)


@pytest.mark.parametrize("case", FAST)
def test_mixed_meshes(fast, case):
  check(fast[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_every_axis(slow, case):
  check(slow[case])
