"""The peer: MaxText training the shape in `config.maxtext_tiny` on CPU, synthetic data. Prints JSON.

MaxText needs Python 3.12 and a newer jax, so it lives in a virtual environment of its own:

  python -m experiments.benchmarks.maxtext_peer --install   # makes .venv-maxtext, once, about 1.6 GB
  python -m experiments.benchmarks.maxtext_peer --path ragged_dot

`--path` picks one of its two ways that drop no token: `jax.lax.ragged_dot` or all experts dense. The
rate is that of the median step; the first steps' printed times are wrong (it times dispatch) and are
left out.
"""

import argparse
import glob
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.benchmarks.config import LENGTH, ROWS, maxtext_tiny
from glm5_jax.config import ModelConfig

VENV = Path(".venv-maxtext")
# What maxtext's trainer imports; its own extras would add hundreds of packages that a CPU run never loads.
REQUIREMENTS = [
  "maxtext==0.2.5",
  *("absl-py", "aqtp", "datasets", "drjax", "flax", "grain", "jax", "jaxtyping", "jinja2", "ml-collections"),
  *("ml-goodput-measurement", "omegaconf", "optax", "orbax-checkpoint", "pathwaysutils", "pillow", "psutil"),
  *("pydantic", "pyyaml", "qwix", "sentencepiece", "sympy", "tensorboardX", "tiktoken", "tokamax"),
  "transformers",
]
PATHS = {
  "ragged_dot": {"sparse_matmul": True, "capacity_factor": -1.0},
  "dense_experts": {"sparse_matmul": False, "capacity_factor": -1.0},
}
WRONG_STEPS = 3  # 0 and 1 time dispatch alone, 2 pays for them
STEP = re.compile(r"completed step: (\d+), seconds: ([\d.]+).*?loss: ([\d.]+)")


def arguments(cfg: ModelConfig) -> dict:
  """MaxText's names for the same architecture and optimiser."""
  return {
    "decoder_block": "deepseek",
    "attention_type": "mla",
    "base_num_decoder_layers": cfg.num_hidden_layers,
    "first_num_dense_layers": cfg.first_k_dense_replace,
    "base_emb_dim": cfg.hidden_size,
    "base_num_query_heads": cfg.num_attention_heads,
    "base_num_kv_heads": cfg.num_attention_heads,
    "base_mlp_dim": cfg.intermediate_size,
    "base_moe_mlp_dim": cfg.moe_intermediate_size,
    "num_experts": cfg.n_routed_experts,
    "num_experts_per_tok": cfg.num_experts_per_tok,
    "shared_experts": cfg.n_shared_experts,
    "vocab_size": cfg.vocab_size,
    "q_lora_rank": cfg.q_lora_rank,
    "kv_lora_rank": cfg.kv_lora_rank,
    "qk_nope_head_dim": cfg.qk_nope_head_dim,
    "qk_rope_head_dim": cfg.qk_rope_head_dim,
    "v_head_dim": cfg.v_head_dim,
    "rope_type": "default",
    "mlp_activations": '["silu","linear"]',
    "routed_scaling_factor": cfg.routed_scaling_factor,
    "routed_score_func": cfg.scoring_func,
    "routed_bias": True,
    "logits_via_embedding": cfg.tie_word_embeddings,
    "dtype": cfg.dtype,
    "weight_dtype": cfg.param_dtype,
    "attention": "dot_product",
    "megablox": False,
    "remat_policy": "minimal",
    "opt_type": "adamw",
  }


def command(python: Path, folder: str, steps: int, path: dict) -> list[str]:
  """The trainer's command line for one of PATHS, writing under `folder`."""
  site = subprocess.run(
    [python, "-c", "import maxtext, os; print(os.path.dirname(maxtext.__file__))"],
    check=True,
    capture_output=True,
    text=True,
  ).stdout.strip()
  run = {
    "run_name": "bench",
    "base_output_directory": folder,
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "steps": steps,
    "per_device_batch_size": ROWS,
    "max_target_length": LENGTH,
  }
  values = run | arguments(maxtext_tiny()) | path
  flags = [
    f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()
  ]
  return [str(python), "-m", "maxtext.trainers.pre_train.train", f"{site}/configs/base.yml", *flags]


def measure(python: Path, steps: int, path: dict) -> dict:
  """Runs the trainer and reads its log: tokens/s of the median step, loss, seconds outside the steps."""
  env = os.environ | {"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu"}
  env.pop("PYTHONPATH", None)  # modules of another Python version
  with tempfile.TemporaryDirectory() as folder:
    start = time.perf_counter()
    run = subprocess.run(
      command(python, folder, steps + WRONG_STEPS, path), env=env, cwd=folder, capture_output=True, text=True
    )
    wall = time.perf_counter() - start
  found = [
    (int(step), float(seconds), float(loss)) for step, seconds, loss in STEP.findall(run.stdout + run.stderr)
  ]
  timed = [seconds for step, seconds, _ in found if step >= WRONG_STEPS]
  if run.returncode or not timed:
    tail = "\n".join((run.stdout + run.stderr).splitlines()[-5:])
    raise RuntimeError(f"MaxText ended with exit code {run.returncode} and {len(found)} steps:\n{tail}")
  median = statistics.median(timed)
  return {
    "train_tokens_per_s": ROWS * LENGTH / median,
    "train_step_s": median,
    "start_and_compile_s": wall - median * len(found),
    "loss": found[-1][2],
  }


def find_python() -> str | None:
  """A Python 3.12 or newer that starts: $PYTHON312, this one, python3.12 on PATH, or one of pyenv's."""
  pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
  candidates = [os.environ.get("PYTHON312"), sys.executable, shutil.which("python3.12")]
  candidates += sorted(glob.glob(f"{pyenv}/versions/3.12*/bin/python3.12"))
  test = "import sys; sys.exit(sys.version_info < (3, 12))"
  for candidate in filter(None, candidates):
    try:
      if subprocess.run([candidate, "-c", test], capture_output=True).returncode == 0:
        return candidate
    except OSError:
      continue
  return None


def install() -> str | None:
  """Makes .venv-maxtext unless it is there and complete. Returns what went wrong, or None."""
  stamp = VENV / "complete"
  if stamp.exists():
    return None
  python = find_python()
  if python is None:
    return "no Python 3.12 found: set PYTHON312 to one"
  print(f"Installing MaxText into {VENV}, some minutes …", file=sys.stderr)
  pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
  for line in ([python, "-m", "venv", str(VENV)], pip + REQUIREMENTS):
    run = subprocess.run(line, capture_output=True, text=True)
    if run.returncode:
      return (run.stderr.strip().splitlines() or ["pip failed"])[-1]
  stamp.touch()
  return None


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--install", action="store_true", help="make .venv-maxtext and stop")
  parser.add_argument("--steps", type=int, default=5, help="timed training steps")
  parser.add_argument("--path", choices=list(PATHS), default="ragged_dot")
  args = parser.parse_args(argv)

  if args.install:
    problem = install()
    if problem:
      print(f"MaxText is left out of the table: {problem}", file=sys.stderr)
    return 2 if problem else 0
  python = (VENV / "bin" / "python").absolute()
  if not (VENV / "complete").exists():
    print(f"{VENV} is not there: python -m experiments.benchmarks.maxtext_peer --install", file=sys.stderr)
    return 2
  print(json.dumps(measure(python, args.steps, PATHS[args.path])))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
