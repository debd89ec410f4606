"""The peer: transformers' GlmMoeDsaForCausalLM on torch CPU, of the shape in `config.bench_6m`. Prints JSON.

Runs in any interpreter that has torch and transformers (extra `bench`); it imports nothing of this
project, so that neither side's thread pools or imports weigh on the other.

  python experiments/benchmarks/transformers_peer.py --shape='{"vocab_size": 4096, ...}'

The numbers are training tokens/s of the median step and greedy new tokens/s with the prompt included.
"""

import argparse
import json
import statistics
import sys
import time

ROWS, LENGTH = 8, 512  # a training step
PROMPT, NEW = 64, 64  # tokens of a prompt, tokens generated


def build(shape: dict):
  """The model in float32 with sdpa attention; `shape` is a GLM-5 config.json dictionary."""
  import torch
  import transformers

  torch.manual_seed(0)
  config = transformers.GlmMoeDsaConfig.from_dict(shape)
  config._attn_implementation = "sdpa"
  return transformers.GlmMoeDsaForCausalLM(config).float()


def train_tokens_per_s(model, steps: int) -> dict:
  """Next-token loss, backward and AdamW on ROWS × LENGTH random tokens; the first step warms up."""
  import torch

  tokens = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH))
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
  model.train()
  seconds, losses = [], []
  for _ in range(steps + 1):
    start = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
    seconds.append(time.perf_counter() - start)
  median = statistics.median(seconds[1:])
  return {"train_tokens_per_s": ROWS * LENGTH / median, "train_step_s": median, "loss": losses}


def generate_tokens_per_s(model, prompts: int, repeats: int) -> float:
  """Greedy new tokens/s, best of `repeats` after one warm-up; the prompt's pass is inside the time."""
  import torch

  model.eval()
  tokens = torch.randint(0, model.config.vocab_size, (prompts, PROMPT))
  mask = torch.ones_like(tokens)
  best = float("inf")
  with torch.no_grad():
    for attempt in range(repeats + 1):
      start = time.perf_counter()
      out = model.generate(
        tokens, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
      )
      elapsed = time.perf_counter() - start
      if out.shape != (prompts, PROMPT + NEW):
        raise RuntimeError(f"generate returned {tuple(out.shape)}, expected {(prompts, PROMPT + NEW)}")
      if attempt:
        best = min(best, elapsed)
  return prompts * NEW / best


def matmul_gflops(size: int = 2048, repeats: int = 5) -> float:
  """Float32 rate of a plain matmul, the machine's own ceiling in this library."""
  import torch

  a = torch.ones(size, size)
  a @ a
  start = time.perf_counter()
  for _ in range(repeats):
    a @ a
  return repeats * 2 * size**3 / (time.perf_counter() - start) / 1e9


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shape", required=True, help="JSON dictionary with config.json's fields")
  parser.add_argument("--steps", type=int, default=4, help="timed training steps")
  parser.add_argument("--repeats", type=int, default=3, help="timed generations")
  args = parser.parse_args(argv)

  model = build(json.loads(args.shape))
  result: dict = {"parameters": sum(p.numel() for p in model.parameters()), "matmul_gflops": matmul_gflops()}
  result |= train_tokens_per_s(model, args.steps)
  for prompts in (1, 8):
    result[f"generate_{prompts}_tokens_per_s"] = generate_tokens_per_s(model, prompts, args.repeats)
  print(json.dumps(result))


if __name__ == "__main__":
  main(sys.argv[1:])
