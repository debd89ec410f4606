"""Continues prompts, printing the text as it comes.

python -m launch.generate --checkpoint=runs/x --prompt="def main(" [--speculate=3] [--greedy]

Prompts come from --prompt (repeatable), --prompt_file, or standard input. How fast it went, and with
--speculate how many tokens a round made, goes to standard error.
"""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from glm5_jax.errors import UserError
from launch.common import run

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "folder of a run, a checkpoint, or Hugging Face's")
_STEP = flags.DEFINE_integer("step", None, "step of a checkpoint; the newest by default")
_TOKENIZER = flags.DEFINE_string("tokenizer", "", "tokenizer file, where the folder keeps none")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "text to continue; may be given several times")
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "file that holds one prompt")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "tokens made for each prompt, at most")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "of sampling; 0 is greedy")
_TOP_P = flags.DEFINE_float("top_p", 0.95, "mass of the likeliest tokens to draw from; 1: all")
_GREEDY = flags.DEFINE_bool("greedy", False, "always the likeliest token, as --temperature=0")
_SPECULATE = flags.DEFINE_integer(
  "speculate", 0, "tokens the MTP layer drafts a round; 0: none", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", 0, "of sampling")


def main(_: Sequence[str]) -> None:
  if not _CHECKPOINT.value:
    raise UserError("--checkpoint is needed: the folder of a run, a checkpoint, or Hugging Face's")
  prompts = _prompts()
  # jax starts only once the flags are known to be right
  from glm5_jax.serve.load import open_model, stop_ids
  from glm5_jax.serve.sampling import Sampling
  from glm5_jax.serve.speculate import make_generator
  from glm5_jax.serve.stream import Meter, continue_texts

  sampling = Sampling(0.0 if _GREEDY.value else _TEMPERATURE.value, _TOP_P.value).check()
  model = open_model(_CHECKPOINT.value, _STEP.value)
  tokenizer = model.own_tokenizer(_TOKENIZER.value)
  stops = stop_ids(tokenizer, model.cfg)
  generator = make_generator(model.load_params(), model.cfg, stops, _SPECULATE.value)
  meter = Meter()
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a terminal of few characters is no reason to stop
  try:
    for piece in continue_texts(
      generator, tokenizer, prompts, _MAX_NEW_TOKENS.value, sampling, _SEED.value, meter
    ):
      sys.stdout.write(piece)
      sys.stdout.flush()
  finally:
    if meter.tokens:
      print(f"\n{meter}{generator.summary()}", file=sys.stderr)


def _prompts() -> list[str]:
  """One line end at the end of a file is no part of its prompt."""
  if _PROMPT.value and _PROMPT_FILE.value:
    raise UserError("--prompt and --prompt_file are both given; keep one")
  if _PROMPT.value:
    return _PROMPT.value
  try:
    data = Path(_PROMPT_FILE.value).read_bytes() if _PROMPT_FILE.value else sys.stdin.buffer.read()
    text = data.decode()
  except OSError as error:
    raise UserError(f"--prompt_file {_PROMPT_FILE.value} cannot be read: {error.strerror}") from None
  except UnicodeDecodeError as error:
    raise UserError(f"{_PROMPT_FILE.value or 'standard input'} is not UTF-8 text: {error}") from None
  if not text.removesuffix("\n"):
    raise UserError("no prompt; give --prompt=TEXT, --prompt_file, or text on standard input")
  return [text.removesuffix("\n")]


if __name__ == "__main__":
  run(main)
