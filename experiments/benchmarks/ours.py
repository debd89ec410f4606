"""This project on one of the shapes of `config`: the product's own training step and generator. Prints JSON.

The step is the one that `launch.train` runs (AdamW, clipping, router-bias update, balance loss and metrics
included), the generator the one behind `launch.generate`. Compiling is timed apart.

  python -m experiments.benchmarks.ours --shape bench_6m
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import config
from glm5_jax.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from glm5_jax.model import count_params, init_params
from glm5_jax.optim.groups import make_optimizer
from glm5_jax.serve.generate import Generator
from glm5_jax.serve.sampling import Sampling
from glm5_jax.train.state import init_state
from glm5_jax.train.step import make_train_step

SHAPES = {"bench_6m": config.bench_6m, "maxtext_tiny": config.maxtext_tiny}


def random_batch(cfg: ModelConfig, rows: int, length: int) -> dict[str, np.ndarray]:
  """One document of random tokens a row; the last token has no target."""
  tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (rows, length), np.int32)
  weights = np.ones((rows, length), np.float32)
  weights[:, -1] = 0
  return {
    "tokens": tokens,
    "targets": np.roll(tokens, -1, axis=1),
    "weights": weights,
    "positions": np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
    "segment_ids": np.ones_like(tokens),
  }


def time_training(cfg: ModelConfig, steps: int) -> dict:
  """Median step on random tokens; `compile_s` is tracing and compiling alone."""
  run = RunConfig(
    model=cfg,
    optim=OptimConfig(name="adamw", peak_lr=1e-3, schedule="constant", warmup_steps=0),
    train=TrainConfig(steps=steps + 1, batch_size=config.ROWS),
  )
  run.data.seq_len = config.LENGTH
  run.validate()
  optimizer = make_optimizer(
    run.optim, cfg, jax.eval_shape(lambda: init_params(cfg, jax.random.key(0))), run.train.steps
  )
  state = jax.jit(lambda: init_state(run, optimizer))()
  batch = jax.device_put(random_batch(cfg, config.ROWS, config.LENGTH))

  start = time.perf_counter()
  jitted: Any = make_train_step(run, optimizer)
  step = jitted.lower(state, batch).compile()
  compile_s = time.perf_counter() - start

  seconds, losses = [], []
  for _ in range(steps + 1):
    start = time.perf_counter()
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
    seconds.append(time.perf_counter() - start)
  median = statistics.median(seconds[1:])
  return {
    "train_tokens_per_s": config.ROWS * config.LENGTH / median,
    "train_step_s": median,
    "compile_s": compile_s,
    "loss": losses,
  }


def time_generation(cfg: ModelConfig, prompts: int, repeats: int) -> dict:
  """Greedy new tokens/s with the prompt's pass inside, best of `repeats`, and ms a step after that pass.

  `generate_compile_s` is the whole first call, so a little more than compiling.
  """
  generator = Generator(init_params(cfg, jax.random.key(0)), cfg, stop_ids=())
  tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (prompts, config.PROMPT)).tolist()
  best_total = best_decode = float("inf")
  first_call_s = 0.0
  for attempt in range(repeats + 1):
    start = time.perf_counter()
    stream = generator.stream(tokens, config.NEW, Sampling(temperature=0.0))
    made = len(next(stream)[0])
    prefilled = time.perf_counter()
    made += sum(len(new[0]) for new in stream)
    end = time.perf_counter()
    if made != config.NEW:
      raise RuntimeError(f"the generator made {made} tokens a row, expected {config.NEW}")
    if attempt:
      best_total = min(best_total, end - start)
      best_decode = min(best_decode, (end - prefilled) / (config.NEW - 1))
    else:
      first_call_s = end - start
  return {
    f"generate_{prompts}_tokens_per_s": prompts * config.NEW / best_total,
    f"decode_{prompts}_ms": best_decode * 1e3,
    "generate_compile_s": first_call_s,
  }


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shape", choices=list(SHAPES), default="bench_6m")
  parser.add_argument("--steps", type=int, default=5, help="timed training steps")
  parser.add_argument("--repeats", type=int, default=3, help="timed generations")
  args = parser.parse_args(argv)

  cfg = SHAPES[args.shape]()
  result = {"parameters": count_params(cfg)["total"]} | time_training(cfg, args.steps)
  if args.shape == "bench_6m":
    for prompts in (1, 8):  # the compile time of the larger stays
      result |= time_generation(cfg, prompts, args.repeats)
  print(json.dumps(result))


if __name__ == "__main__":
  main(sys.argv[1:])
