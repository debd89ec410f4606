"""What every command shares: the experiment flag, one-line errors and exit codes.

Exit codes: 0 done, 2 something the user can put right (one line on stderr), 3 another process of the run
died (one line; the same command, started again in all of them, goes on), 130 interrupted, 1 a bug of ours
(with its traceback).
"""

import contextlib
import dataclasses
import difflib
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from glm5_jax.config import RunConfig
from glm5_jax.errors import UserError

# The flags defined here belong to the command that asks for them, so that its --help shows them.
flags.disclaim_key_flags()

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# Conditions of the user's machine, not of our code.
_MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def run(main: Callable[[Sequence[str]], Any]) -> None:
  """Parses the flags, calls `main([program])` and exits with a code from the table above."""
  try:
    app.run(main, flags_parser=_parse_flags)
  except (Exception, KeyboardInterrupt) as error:
    code = _report_end(error)
    if code is None:
      raise
    sys.exit(code)


def _report_end(error: BaseException) -> int | None:
  """The exit code of a command that ended by `error`, reported in one line; None for a bug of ours."""
  if isinstance(error, UserError):
    return _report(str(error), getattr(error, "exit_code", EXIT_USER_ERROR))
  if isinstance(error, KeyboardInterrupt):
    print("interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED
  if isinstance(error, BrokenPipeError):
    # Whoever read our output has seen enough. Nothing more may go there, not even at the end of Python.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS and error.filename:
    return _report(f"{error.filename}: {os.strerror(error.errno)}")
  return None


def distributed_flags() -> Callable[[], contextlib.AbstractContextManager[bool]]:
  """Defines the flags by which several processes find each other.

  Returns:
    Called in `main` before jax is asked for anything, a context: the processes come together when it is
    entered, which gives whether there are several, and part at its end. A process that fails inside ends
    there, with its report and exit code, since it cannot wait for the others.
  """
  coordinator = flags.DEFINE_string(
    "coordinator",
    "",
    "host:port of process 0, where the processes of a run meet; a pod's environment tells it",
  )
  processes = flags.DEFINE_integer(
    "processes", 0, "how many processes run this command together; 0: as the environment says, 1: alone"
  )
  process_id = flags.DEFINE_integer("process_id", -1, "of this one, from 0; -1: as the environment says")
  timeout = flags.DEFINE_integer("coordinator_timeout", 60, "seconds that the processes wait for each other")

  @contextlib.contextmanager
  def together() -> Iterator[bool]:
    from glm5_jax.parallel import distributed  # jax starts only once the flags are known to be right

    try:
      yield distributed.start(coordinator.value, processes.value, process_id.value, timeout.value)
    except (Exception, KeyboardInterrupt) as error:
      if distributed.several():
        distributed.leave(error, _report_or_trace)
      raise
    distributed.finish()

  return together


def _report_or_trace(error: BaseException) -> int:
  code = _report_end(error)
  if code is None:
    traceback.print_exception(error)
  return 1 if code is None else code


def config_flag() -> flags.FlagHolder:
  """Defines `--config=experiments/x.py[:argument]` and `--config.section.field=value` over RunConfig."""
  return config_flags.DEFINE_config_file(
    "config", help_string="experiment file; its get_config([argument]) returns a RunConfig"
  )


def load_config(value: Any) -> RunConfig:
  """The validated config behind the flag that `config_flag` defined.

  Raises:
    UserError: no experiment was named, it returns something else, or a field has an impossible value.
  """
  if value is None:
    raise UserError(_no_experiment())
  if not isinstance(value, RunConfig):
    try:  # a file that could not be read comes as an object which raises that error when touched
      kind = type(value).__name__
      getattr(value, "model", None)
    except OSError as error:
      raise UserError(f"--config: {error}") from None
    raise UserError(f"--config: get_config() returned a {kind}; it should return a glm5_jax.config.RunConfig")
  value.validate()
  return value


def _report(message: str, code: int = EXIT_USER_ERROR) -> int:
  print("error:", " ".join(message.split()), file=sys.stderr)
  return code


def _parse_flags(argv: list[str]) -> list[str]:
  """absl's flags_parser: every mistake in the command line becomes one UserError."""
  expanded = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
  path = _check_config_arguments(expanded[1:])
  try:
    rest = flags.FLAGS(argv)
  except SystemExit as stop:  # --help and its kin print and stop; absl calls that a failure
    raise SystemExit(0) from stop
  except UserError:
    raise
  except Exception as error:
    where = _line_in(path, f"{traceback.format_exc()}\n{error}") if path else ""
    if where:
      last = str(error).strip().splitlines() or [""]
      name = type(error).__name__ + ": "
      # Errors of two kinds reach us as absl's, with the original one on the last line of the text.
      raise UserError(where + ("" if isinstance(error, flags.Error) else name) + last[-1]) from None
    if isinstance(error, flags.Error):
      raise UserError(str(error)) from None
    raise
  if len(rest) > 1:
    raise UserError(f"unexpected argument {rest[1]!r}; flags start with --")
  if flags.FLAGS["verbosity"].using_default_value:
    logging.set_verbosity(logging.WARNING)
    flags.FLAGS["verbosity"].using_default_value = False  # else absl raises it to INFO: libraries chat there
  return rest


def _check_config_arguments(argv: Sequence[str]) -> str | None:
  """Checks `--config` and the names of its overrides; returns the experiment file's path, if any."""
  if "config" not in flags.FLAGS:
    return None
  path = None
  for i, argument in enumerate(argv):
    if argument == "--":
      break
    name, equals, value = argument.partition("=")
    if name in ("--config", "-config"):
      path = _check_file(value if equals else next(iter(argv[i + 1 :]), ""))
    elif match := re.fullmatch(r"--?(?:no)?config\.(.+)", name):
      if path is None:
        raise UserError(f"{name} needs --config before it; {_no_experiment()}")
      _check_field(match[1])
  return path


def _check_file(value: str) -> str:
  path = value.partition(":")[0]
  if not path:
    raise UserError(_no_experiment())
  if not Path(path).is_file():
    raise UserError(f"--config: no file {path}; {_no_experiment()}")
  if "get_config" not in Path(path).read_text(encoding="utf-8", errors="replace"):
    raise UserError(f"--config: {path} has no function get_config(); it should return a RunConfig")
  return path


def _no_experiment() -> str:
  folder = Path(__file__).parent.parent / "experiments"
  found = sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")
  return f"name an experiment file, --config=experiments/NAME.py (there: {', '.join(found)})"


def _check_field(path: str) -> None:
  """Raises UserError with the near misses unless `path` ("optim.peak_lr") is a leaf of RunConfig."""
  leaves = list(_leaves(RunConfig(), ""))
  if path in leaves:
    return
  inside = [leaf.removeprefix(path + ".") for leaf in leaves if leaf.startswith(path + ".")]
  if inside:
    raise UserError(f"config.{path} is a section; set one of its fields: {', '.join(inside)}")
  names = difflib.get_close_matches(path.split(".")[-1], {leaf.split(".")[-1] for leaf in leaves}, n=3)
  near = [leaf for name in names for leaf in leaves if leaf.split(".")[-1] == name]
  near = near or difflib.get_close_matches(path, leaves, n=3)
  if near:
    raise UserError(
      f"config.{path} is no field; did you mean {' or '.join(f'config.{leaf}' for leaf in near)}?"
    )
  section = path.split(".")[0] + "."
  fields = [leaf for leaf in leaves if leaf.startswith(section)] or [
    f.name for f in dataclasses.fields(RunConfig)
  ]
  raise UserError(f"config.{path} is no field; there are {', '.join(fields)}")


def _leaves(config: Any, prefix: str) -> Iterator[str]:
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      yield from _leaves(value, f"{prefix}{field.name}.")
    else:
      yield prefix + field.name


def _line_in(path: str, text: str) -> str:
  """Where a printed traceback last passed through `path`, as "experiments/x.py:12: ", or ""."""
  lines = re.findall(rf'File "[^"]*{re.escape(os.path.basename(path))}", line (\d+)', text)
  return f"{path}:{lines[-1]}: " if lines else ""
