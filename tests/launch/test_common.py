"""Bad command lines end in one line and exit code 2, before jax is imported."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.conftest import ROOT

COMMAND = """
import errno, sys
from absl import flags, logging
from glm5_jax.errors import UserError
from launch import common

_CONFIG = common.config_flag()
_RAISE = flags.DEFINE_string("raise", "", "which error to raise")

def main(argv):
  config = common.load_config(_CONFIG.value)
  logging.info("chatter")
  if _RAISE.value == "user": raise UserError("two\\nlines")
  if _RAISE.value == "interrupt": raise KeyboardInterrupt
  if _RAISE.value == "disk": raise OSError(errno.ENOSPC, "No space left on device", "runs/x/3")
  if _RAISE.value == "bug": raise OSError(errno.EBADF, "bad descriptor", "runs/x/3")
  print(config.train.steps, config.optim.peak_lr, config.model.eos_token_id, config.model.scan_layers)

if __name__ == "__main__":
  common.run(main)
"""

EXPERIMENT = """
from glm5_jax.config import DataConfig, ModelConfig, RunConfig, tiny
from glm5_jax.errors import UserError

def get_config(kind="run"):
  if kind == "misspelt":
    return ModelConfig(hiden_size=1)
  if kind == "broken":
    return {}["absent"]
  if kind == "reads":
    open("/nonexistent/x")
  if kind == "refuses":
    raise UserError("kind should be run")
  return {} if kind == "dict" else RunConfig(model=tiny(), data=DataConfig(seq_len=32))
"""


@pytest.fixture
def run(tmp_path):
  """`run("--config=x.py", …)` in a folder with a command and experiment files."""
  (tmp_path / "command.py").write_text(COMMAND)
  (tmp_path / "x.py").write_text(EXPERIMENT)
  (tmp_path / "syntax.py").write_text("\ndef get_config(:\n")
  (tmp_path / "empty.py").write_text("x = 1\n")

  def run(*arguments):
    return subprocess.run(
      [sys.executable, "command.py", *arguments],
      cwd=tmp_path,
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=60,
    )

  return run


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ([], "name an experiment file, --config=experiments/NAME.py (there: glm5_744b.py, "),
    (["--config"], "name an experiment file"),
    (["--config="], "name an experiment file"),
    (["--config=absent.py"], "--config: no file absent.py; "),
    (["--config=empty.py"], "empty.py has no function get_config()"),
    (["--config=syntax.py"], "syntax.py:2: SyntaxError: invalid syntax"),
    (["--config=x.py:misspelt"], "x.py:7: TypeError: ModelConfig.__init__() got an unexpected keyword"),
    (["--config=x.py:broken"], "x.py:9: KeyError: 'absent'"),
    (["--config=x.py:reads"], "No such file or directory: '/nonexistent/x'"),
    (["--config=x.py:refuses"], "kind should be run"),
    (["--config=x.py:dict"], "get_config() returned a dict; it should return a glm5_jax.config.RunConfig"),
    (["--config=x.py", "--config.optim.peek_lr=1"], "config.optim.peek_lr is no field; did you mean config"),
    (["--config=x.py", "--config.optim.peek_lr=1"], "did you mean config.optim.peak_lr?"),
    (["--config=x.py", "--config.peak_lr", "1"], "did you mean config.optim.peak_lr?"),
    (["--config=x.py", "--noconfig.model.scan_layer"], "did you mean config.model.scan_layers?"),
    (["--config=x.py", "--config.seed=1"], "config.data.seed or config.train.seed?"),
    (["--config=x.py", "--config.mesh.zzz=1"], "config.mesh.zzz is no field; there are mesh.data, mesh.fsdp"),
    (["--config=x.py", "--config.zzz=1"], "config.zzz is no field; there are name, model, data"),
    (["--config=x.py", "--config.mesh=1"], "config.mesh is a section; set one of its fields: data, fsdp"),
    (["--config.train.steps=1", "--config=x.py"], "--config.train.steps needs --config before it"),
    (["--config=x.py", "--config.train.steps=1.5"], "--config.train.steps=1.5: invalid literal for int()"),
    (["--config=x.py", "--config.optim.peak_lr=fast"], "--config.optim.peak_lr=fast: could not convert"),
    (["--config=x.py", "--config.train.steps"], "Missing value for flag --config.train.steps"),
    (["--config=x.py", "--config.train.steps=0"], "config.train.steps=0: should be at least 1"),
    (["--config=x.py", "--rais=user"], "Unknown command line flag 'rais'. Did you mean: raise ?"),
    (["--config=x.py", "steps=3"], "unexpected argument 'steps=3'; flags start with --"),
    (["--config=x.py", "--raise=user"], "two lines"),
    (["--config=x.py", "--raise=disk"], "runs/x/3: No space left on device"),
  ],
)  # fmt: skip
def test_bad_command_line(run, arguments, said):
  done = run(*arguments)
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
  assert said in done.stderr
  assert done.stdout == ""


def test_overrides_reach_the_config_and_libraries_stay_quiet(run):
  done = run(
    "--config", "x.py", "--config.train.steps=700", "--config.optim.peak_lr", "1e-2",
    "--config.model.eos_token_id=3,4", "--noconfig.model.scan_layers",
  )  # fmt: skip
  assert (done.returncode, done.stdout, done.stderr) == (0, "700 0.01 (3, 4) False\n", "")


def test_interrupt_exits_130(run):
  done = run("--config=x.py", "--raise=interrupt")
  assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_bug_keeps_its_traceback(run):
  done = run("--config=x.py", "--raise=bug")
  assert done.returncode == 1 and "Traceback" in done.stderr and "bad descriptor" in done.stderr


def test_help_shows_the_commands_flags_and_succeeds(run):
  done = run("--help")
  assert done.returncode == 0 and "--config" in done.stdout and "--raise" in done.stdout


def test_flags_and_checks_do_not_import_jax():
  code = """
    import sys
    from launch import common
    from glm5_jax.config import tiny
    tiny().validate()
    print("jax" in sys.modules)
  """
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert done.stdout == "False\n"
