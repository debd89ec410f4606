"""One program of the table of kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Array = tuple[tuple[int, ...], str]  # shape and dtype
Trips = tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True)
class Row:
  """One program.

  Attributes:
    task: rows of a task stand together and are compared with its first.
    arguments: of `function`, by shape and dtype.
    trips: of kernels' loops whose trip count depends on data, in the order of the program, by a part of the
      kernel's name; a function of the generation where they differ. Loops of a few bundles, transfers in
      pieces, count once and are not among them.
    flops: of the matrix products that the task cannot do without, for the time that they take at peak.
    note: what the trips stand for.
    moved: bytes between memory and a kernel, by a part of its name, where that is more than its operands and
      results once.
    grids: steps of kernels' grids of dynamic size, of all cores together, by a part of the kernel's name.
    computed: the part of the steps of the kernels' grids that are computed; others are taken for free.
  """

  task: str
  name: str
  function: Callable[..., Any]
  arguments: tuple[Array, ...]
  trips: Trips | Callable[[str], Trips] = ()
  flops: float | None = None
  note: str = ""
  moved: tuple[tuple[str, float], ...] = ()
  grids: tuple[tuple[str, float], ...] = ()
  computed: float = 1.0

  def trips_on(self, generation: str) -> dict[str, tuple[float, ...]]:
    return dict(self.trips(generation) if callable(self.trips) else self.trips)
