"""Several processes that act as one: start-up, small exchanges with deadlines, an end when one of them dies.

jax does the work: its coordination service, which runs in process 0, knows who is alive by heartbeats. A
process that misses them makes jax abort all others with a page of text; here that page ends in one line
that says what happened, and the exit code is LOST.
"""

import contextlib
import itertools
import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple, NoReturn

import jax
import numpy as np
from jax._src import clusters
from jax._src import distributed as jax_distributed
from jax.sharding import NamedSharding

from glm5_jax.errors import UserError
from glm5_jax.parallel.last_words import STDERR, on_abort_as_before, on_abort_say, say, stderr_kept

HEARTBEAT_S = 30  # silence after which a process counts as dead
LOST = 3  # exit code when another process died: a supervisor may start all of them again
_UNREACHABLE = 2  # exit code when the processes did not come together, as for any UserError
_PROBE_S = 2.0
_JAX_GRACE_S = 5  # jax waits that much longer than it is told
_TELL_S = 5.0
_POLL_S = 1.0  # between looks for bad news
_FAILED = "glm5/failed"  # key under which a failing process says so


class ProcessLost(UserError):
  """Another process of the run died, left or does not answer."""

  exit_code = LOST


class _Group(NamedTuple):
  """This process among those of the run."""

  coordinator: str  # host:port
  processes: int
  process_id: int
  local_device_ids: list[int] | None = None  # None: all that there are

  def __str__(self) -> str:
    return f"process {self.process_id} of {self.processes}"


_group: _Group | None = None
_watch: threading.Thread | None = None
_stop_watch = threading.Event()
_counter = itertools.count()  # barriers and gathers are numbered; every process does them in the same order


def start(
  coordinator: str = "",
  processes: int = 0,
  process_id: int = -1,
  timeout_s: int = 60,
  heartbeat_s: int = HEARTBEAT_S,
) -> bool:
  """Joins this process with the others of the run. Call it before anything asks jax for its devices.

  What is not given comes from the environment, where jax knows it (Cloud TPU, GKE, SLURM, Open MPI,
  Kubernetes); without such an environment, or alone in it, the process stays by itself.

  Args:
    coordinator: host:port of process 0, which listens there.
    processes: how many there are; 1 stays alone whatever the environment says.
    process_id: 0 … processes − 1.
    timeout_s: how long the processes wait for each other.
    heartbeat_s: silence after which a process counts as dead and the others end.

  Returns:
    Whether there are several processes.

  Raises:
    UserError: an incomplete or impossible choice, or a coordinator that does not answer in time.
  """
  global _group, _watch
  if _group is not None:
    raise UserError(f"{_group} is started already")
  group = _resolve(coordinator, processes, process_id, timeout_s)
  if group is None:
    return False
  deadline = time.monotonic() + timeout_s
  if group.process_id:
    _await_coordinator(group, deadline, timeout_s)
  else:
    _check_port(group)
  seconds = max(1, round(deadline - time.monotonic()) - _JAX_GRACE_S)
  _connect(group, seconds, timeout_s, heartbeat_s)
  _group = group
  on_abort_say(STDERR, lambda: _why_aborted(group), LOST)
  _stop_watch.clear()
  _watch = threading.Thread(target=_end_when_told, args=(group, _client()), daemon=True)
  _watch.start()
  _check_agreement(group, timeout_s)
  return True


def several() -> bool:
  """Whether this process is joined with others."""
  return _group is not None


def finish() -> None:
  """The end of a run that went well: waits for the others, then parts from them."""
  global _group
  if _group is not None:
    _group = None
    assert _watch is not None
    _stop_watch.set()
    _watch.join()  # inside jax's client it would not survive the end of Python
    jax.distributed.shutdown()
    on_abort_as_before()


def leave(error: BaseException, report: Callable[[BaseException], int]) -> NoReturn:
  """Ends this process, one of several, after `error`: jax would wait for the others, and abort.

  The others are told why and end with LOST. An error of a collective whose partner is gone is reported
  here, in one line, and ends this process with LOST too; everything else by `report`, which returns the
  exit code.
  """
  assert _group is not None
  if isinstance(error, jax.errors.JaxRuntimeError) and re.search(_PARTNER_GONE, str(error)):
    what = f"lost another process in the middle of a step ({_first_line(error)})"
    say(STDERR, f"{_group} ends: it {what}")
    code = LOST
  else:
    _stop_watch.set()  # several may fail at once: each ends with its own report and code
    code = report(error)
    what = f"failed: {_first_line(error)}"
  sys.stdout.flush()
  sys.stderr.flush()
  # In a thread, for this waits where the coordinator is gone.
  teller = threading.Thread(target=_tell, args=(f"process {_group.process_id} {what}",), daemon=True)
  teller.start()
  teller.join(_TELL_S)
  os._exit(code)


_PARTNER_GONE = r"Gloo .* failed|[Hh]eartbeat|Connection (reset|closed|refused)|coordination service"


def barrier(name: str, timeout_s: float = 300) -> None:
  """Waits until every process has come here.

  Raises:
    ProcessLost: not all came within `timeout_s`.
  """
  if _group is None:
    return
  try:
    _client().wait_at_barrier(f"glm5/{next(_counter)}/{name}", int(timeout_s * 1000))
  except jax.errors.JaxRuntimeError as error:
    which = f"{name}: not all {_group.processes} processes came within {timeout_s} s"
    raise ProcessLost(f"{which} ({_first_line(error)})") from None


def gather_json(value: Any, timeout_s: float = 300) -> list[Any]:
  """Every process's small JSON-able value, in order of process_id, on all of them.

  All values come back as JSON makes them, one's own too (tuples are lists).

  Raises:
    ProcessLost: not all came within `timeout_s`.
  """
  text = json.dumps(value)
  if _group is None:
    return [json.loads(text)]
  client, folder = _client(), f"glm5/gather/{next(_counter)}"
  client.key_value_set(f"{folder}/{_group.process_id}", text)
  barrier("gather", timeout_s)
  found = {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(folder)}
  barrier("gathered", timeout_s)  # nobody takes its value back before all have read it
  client.key_value_delete(f"{folder}/{_group.process_id}")
  return [json.loads(found[process]) for process in range(_group.processes)]


def local_parts(sharding: NamedSharding) -> tuple[list[int], int]:
  """Which rows this process feeds: (part, parts) for `make_train_iterator` and `heldout_batches`.

  Args:
    sharding: of a batch [B, …]; its first dimension is cut into `parts` equal runs of rows.

  Returns:
    The runs of this process's devices, rising, and how many runs there are. Processes whose devices differ
    along other mesh axes alone feed the same rows.
  """
  axes = sharding.spec[0] if len(sharding.spec) else ()
  names = (axes,) if isinstance(axes, str) else axes or ()
  parts = math.prod(sharding.mesh.shape[name] for name in names)
  rows = NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(axes))
  indices = rows.addressable_devices_indices_map((parts,)).values()
  return sorted({index[0].start or 0 for index in indices if index is not None}), parts


def global_batch(local: Mapping[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
  """Global arrays [B, …] of every process's rows: those of its `local_parts`, in that order."""
  mine, parts = local_parts(sharding)

  def place(rows: np.ndarray) -> jax.Array:
    shape = (len(rows) // len(mine) * parts, *rows.shape[1:])
    return jax.make_array_from_process_local_data(sharding, rows, shape)

  return {name: place(rows) for name, rows in local.items()}


def _tell(what: str) -> None:
  assert _group is not None
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was faster, or all are gone
    _client().key_value_set(_FAILED, what)
  if _group.process_id == 0:
    time.sleep(2 * _POLL_S)  # the news goes out before the coordinator does


def _end_when_told(group: _Group, client: Any) -> None:
  """In a thread: looks for the news that another process failed, and ends this one."""
  while not _stop_watch.wait(_POLL_S):
    try:
      what = client.key_value_try_get(_FAILED)
    except jax.errors.JaxRuntimeError:
      continue  # no news, or the coordinator is gone and jax aborts
    if what.startswith(f"process {group.process_id} "):
      return
    say(STDERR, f"{group} ends: {what}")
    os._exit(LOST)


def _client() -> Any:
  return jax_distributed.global_state.client


def _resolve(coordinator: str, processes: int, process_id: int, timeout_s: int) -> _Group | None:
  """Flags first, then the environment; None for a process by itself."""
  if timeout_s < 1:
    raise UserError(f"--coordinator_timeout={timeout_s}: should be at least 1 second")
  if processes == 1 and not coordinator and process_id in (-1, 0):
    return None
  given = (
    coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
    processes or None,
    None if process_id == -1 else process_id,
  )
  detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
  try:
    address, count, rank, local = detect(*given, None, None, timeout_s)
  except (OSError, RuntimeError, ValueError) as error:
    raise UserError(
      f"the environment does not tell the processes of this run ({error}); "
      "give --coordinator, --processes and --process_id, or --processes=1 to run alone"
    ) from None
  if address is None and count is None and rank is None:
    return None
  values = {"--coordinator=host:port": address, "--processes": count, "--process_id": rank}
  missing = [flag for flag, value in values.items() if value is None]
  if missing:
    raise UserError(f"{' and '.join(missing)} must be given too: the environment does not tell")
  assert address is not None and count is not None and rank is not None
  if count < 1 or not 0 <= rank < count:
    raise UserError(f"--process_id={rank} --processes={count}: the id should be 0 … processes − 1")
  if not re.fullmatch(r".+:\d{1,5}", address):
    raise UserError(f"--coordinator={address}: should be host:port of process 0")
  return _Group(address, count, rank, list(local) if local else None) if count > 1 else None


def _check_port(group: _Group) -> None:
  """Refuses a port that is in use, over which jax crashes."""
  host, _, port = group.coordinator.rpartition(":")
  host = host.strip("[]") if _bind_address(group.coordinator) else ""  # "": every interface
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    with socket.socket(family) as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      probe.bind((host, int(port)))
  except (OSError, OverflowError) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"process 0 cannot listen at the coordinator {group.coordinator}: {reason}") from None


def _await_coordinator(group: _Group, deadline: float, timeout_s: int) -> None:
  """Until process 0 listens: jax itself aborts the process where nobody does."""
  while not _answers(group.coordinator):
    if time.monotonic() >= deadline:
      raise UserError(
        f"no answer from the coordinator at {group.coordinator} within {timeout_s} s ({group}); "
        "process 0 should run there, and the port be open"
      )
    time.sleep(0.2)


def _answers(address: str) -> bool:
  host, _, port = address.rpartition(":")
  try:
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S):
      return True
  except (OSError, OverflowError):
    return False


def _connect(group: _Group, seconds: int, timeout_s: int, heartbeat_s: int) -> None:
  """jax.distributed.initialize, whose abort on a time-out becomes one line that names the address."""
  with stderr_kept() as (kept, stderr):
    on_abort_say(stderr, lambda: _why_not_joined(group, timeout_s, kept), _UNREACHABLE)
    try:
      jax.distributed.initialize(
        group.coordinator,
        group.processes,
        group.process_id,
        group.local_device_ids,
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=heartbeat_s,
        coordinator_bind_address=_bind_address(group.coordinator),
      )
    except (RuntimeError, OSError) as error:
      on_abort_as_before()
      raise UserError(
        f"{group} could not join at the coordinator {group.coordinator}: {_first_line(error)}"
      ) from None


def _bind_address(coordinator: str) -> str | None:
  """Where process 0 listens. jax's choice is every interface, too many for processes of one machine."""
  loopback = re.match(r"(localhost|127\..*|\[::1\]):", coordinator)
  return coordinator if loopback else None


def _check_agreement(group: _Group, timeout_s: int) -> None:
  """Process 0's number of processes holds; another one's that differs would wait in vain later."""
  key = "glm5/processes"
  if group.process_id == 0:
    _client().key_value_set(key, str(group.processes))
    return
  count = int(_client().blocking_key_value_get(key, timeout_s * 1000))
  if count != group.processes:
    raise UserError(
      f"--processes={group.processes} here and {count} in process 0; it should be the same in all"
    )


def _first_line(error: BaseException) -> str:
  return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _why_aborted(group: _Group) -> str:
  if group.process_id and not _answers(group.coordinator):
    return f"{group} ends: process 0, the coordinator at {group.coordinator}, died or cannot be reached"
  return f"{group} ends: another process died or cannot be reached; jax names it above"


def _why_not_joined(group: _Group, timeout_s: int, kept: BinaryIO) -> str:
  kept.seek(0)
  status = re.search(r"absl::Status: (.*)", kept.read().decode(errors="replace"))
  detail = f" ({status[1].split('Additional GRPC')[0].strip()})" if status else ""
  where = f"the coordinator {group.coordinator} within {timeout_s} s{detail}"
  return f"{group}: the processes did not meet at {where}; start all, each with its own --process_id"
