"""launch.generate as its users meet it: text on stdout, speed on stderr, clean ends."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from glm5_jax.serve.generate import Generator
from glm5_jax.serve.load import open_model, stop_ids
from glm5_jax.serve.sampling import Sampling
from tests.conftest import ROOT
from tests.evals import runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("generate")
  # Positions enough that a test can interrupt it.
  return runs.make_run(folder / "run", runs.make_data(folder / "data"), max_position_embeddings=100_000)


@pytest.fixture(scope="module")
def greedy(run):
  """greedy(prompt, count): the text that the library continues `prompt` with."""
  model = open_model(run)
  tokenizer = model.own_tokenizer()
  generator = Generator(model.load_params(), model.cfg, stop_ids(tokenizer, model.cfg))

  def text(prompt, count):
    (ids,) = generator.generate([tokenizer.encode(prompt)], count, Sampling(temperature=0.0))
    return tokenizer.decode(ids, skip_special=True)

  return text


def test_plain_and_speculative_text_are_the_same(command, run, greedy):
  plain = command("generate", f"--checkpoint={run}", "--prompt=def f(", "--max_new_tokens=20", "--greedy")
  assert (plain.returncode, plain.stdout) == (0, "def f(" + greedy("def f(", 20) + "\n"), plain.stderr
  assert "20 tokens in" in plain.stderr and "a round" not in plain.stderr
  drafted = command(
    "generate",
    f"--checkpoint={run}",
    "--prompt=def f(",
    "--max_new_tokens=20",
    "--temperature=0",
    "--speculate=2",
  )
  assert (drafted.returncode, drafted.stdout) == (0, plain.stdout), drafted.stderr
  assert "tokens a round, drafts held: " in drafted.stderr


def test_several_prompts_come_in_order(command, run, greedy):
  done = command(
    "generate", f"--checkpoint={run}", "--prompt=class A", "--prompt=é", "--max_new_tokens=8", "--greedy"
  )
  first, second = greedy("class A", 8), greedy("é", 8)
  assert done.stdout == f"--- 1 of 2\nclass A{first}\n\n--- 2 of 2\né{second}\n", done.stderr


def test_a_seed_decides_and_standard_input_is_a_prompt(run):
  def sample(seed):
    arguments = [f"--checkpoint={run}", "--max_new_tokens=12", f"--seed={seed}"]
    done = subprocess.run(
      [sys.executable, "-m", "launch.generate", *arguments],
      cwd=ROOT,
      input=b"x = 1\n",
      capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

  first = sample(1)
  assert first.startswith(b"x = 1")
  assert first == sample(1) != sample(2)


def started(run):
  """A command that writes for minutes, and has begun to."""
  arguments = [f"--checkpoint={run}", "--prompt=ab", "--max_new_tokens=60000", "--seed=3"]
  process = subprocess.Popen(
    [sys.executable, "-m", "launch.generate", *arguments],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    env={**os.environ, "PYTHONUNBUFFERED": "1"},
  )
  assert process.stdout.read(3)[:2] == b"ab"
  return process


def test_interrupt_ends_with_the_speed_and_130(run):
  with started(run) as process:
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=120)[1].decode()
  assert process.returncode == 130
  assert "tokens in" in errors and errors.endswith("interrupted\n") and "Traceback" not in errors


def test_a_reader_that_leaves_is_no_error(run):
  with started(run) as process:
    process.stdout.close()
    errors = process.stderr.read().decode()
  assert process.returncode == 0
  assert "tokens in" in errors and "Traceback" not in errors and "BrokenPipe" not in errors


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ([], "--checkpoint is needed"),
    (["--checkpoint={run}"], "no prompt; give --prompt=TEXT"),
    (["--checkpoint={run}", "--prompt_file=/nonexistent"], "--prompt_file /nonexistent cannot be read"),
    (["--checkpoint={run}", "--prompt_file={run}/bytes"], "bytes is not UTF-8 text"),
    (
      ["--checkpoint={run}", "--prompt=a", "--prompt_file={run}/bytes"],
      "--prompt and --prompt_file are both",
    ),
    (["--checkpoint={run}", "--prompt="], "a prompt is empty"),
    (["--checkpoint={run}", "--prompt=a", "--top_p=0"], "top_p 0.0 must be above 0"),
    (["--checkpoint={run}", "--prompt=a", "--max_new_tokens=0"], "max_new_tokens 0 must be at least 1"),
    (["--checkpoint={run}", "--prompt=a", "--speculate=99"], "draft_steps 99 must lie between 1 and 15"),
    (["--checkpoint={run}", "--prompt=a", "--max_new_tokens=100000"], "this model has 100000"),
    (["--checkpoint={run}", "--prompt=a", "--tokenizer=/nonexistent"], "tokenizer file /nonexistent cannot"),
  ],
)
def test_mistakes_are_one_line(command, run, arguments, said):
  (run / "bytes").write_bytes(b"\xff\xfe\x00")
  done = command("generate", *(argument.format(run=run) for argument in arguments))
  assert done.returncode == 2, done.stdout + done.stderr
  assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
  assert said in done.stderr and done.stdout == ""


def test_another_tokenizer_beside_the_checkpoint(command, run, tmp_path):
  copy = shutil.copytree(run, tmp_path / "copy")
  shutil.copy(runs.make_data(tmp_path / "other", vocab_size=340) / "tokenizer.model", copy)
  done = command("generate", f"--checkpoint={copy}", "--prompt=a")
  assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
  assert (
    f"tokenizer {copy}/tokenizer.model has fingerprint" in done.stderr and f"checkpoint {copy}" in done.stderr
  )
