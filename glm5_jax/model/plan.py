"""Which layers are alike: groups them into segments that are stacked and scanned.

A block is described by what its code depends on: attention letter, dense or MoE, owner of an indexer
or not. A segment is `repeats` copies of a unit of `period` blocks; its weights carry a leading axis
of length `repeats` when that is more than one. GLM-5 is 3 dense + 75 MoE blocks in two segments;
GLM-5.2's IndexShare gives units of four.
"""

import dataclasses
from typing import Any

import jax

from glm5_jax.config import ModelConfig

MAX_PERIOD = 8  # longest repeating pattern of blocks looked for


@dataclasses.dataclass(frozen=True)
class BlockSpec:
  """What distinguishes one block's code and weights from another's."""

  attention: str
  moe: bool
  owns_indexer: bool


@dataclasses.dataclass(frozen=True)
class Segment:
  """Layers start … start + period · repeats − 1."""

  start: int
  unit: tuple[BlockSpec, ...]
  repeats: int

  @property
  def name(self) -> str:
    return f"layers_{self.start}"

  @property
  def period(self) -> int:
    return len(self.unit)

  @property
  def stacked(self) -> bool:
    return self.repeats > 1


def block_spec(cfg: ModelConfig, layer: int) -> BlockSpec:
  return BlockSpec(cfg.attention_kind(layer), cfg.is_moe(layer), cfg.owns_indexer(layer))


def layer_plan(cfg: ModelConfig) -> tuple[Segment, ...]:
  """Segments in order; with `scan_layers` off, one unstacked segment a layer."""
  specs = [block_spec(cfg, i) for i in range(cfg.num_hidden_layers)]
  if not cfg.scan_layers:
    return tuple(Segment(i, (spec,), 1) for i, spec in enumerate(specs))
  segments, start = [], 0
  while start < len(specs):
    period, repeats = _longest_repeat(specs[start:])
    segments.append(Segment(start, tuple(specs[start : start + period]), repeats))
    start += period * repeats
  return tuple(segments)


def _longest_repeat(specs: list[BlockSpec]) -> tuple[int, int]:
  """(period, repeats) that covers most leading layers; the shorter period among equals."""
  best = (1, 1)
  for period in range(1, min(MAX_PERIOD, len(specs)) + 1):
    repeats = 1
    while specs[repeats * period : (repeats + 1) * period] == specs[:period]:
      repeats += 1
    if (repeats > 1 or period == 1) and period * repeats > best[0] * best[1]:
      best = (period, repeats)
  return best


def locate(cfg: ModelConfig, layer: int) -> tuple[tuple[str, str], int | None]:
  """Where a layer's weights stand: ((segment, block), index on the leading axis or None).

  The MTP layer is `num_hidden_layers`, as in the released checkpoint: (("mtp", "block"), None).
  """
  if layer == cfg.num_hidden_layers:
    return ("mtp", "block"), None
  for segment in layer_plan(cfg):
    offset = layer - segment.start
    if 0 <= offset < segment.period * segment.repeats:
      index = offset // segment.period if segment.stacked else None
      return (segment.name, f"block_{offset % segment.period}"), index
  raise IndexError(f"layer {layer} of {cfg.num_hidden_layers}")


def unstack(params: dict[str, Any], cfg: ModelConfig) -> tuple[dict[str, Any], ModelConfig]:
  """The same weights with one entry a layer, and the config that reads them (`scan_layers` off).

  Decoding uses this: a scan would copy each layer's slice of the stack at every token.
  """
  flat_cfg = cfg.replace(scan_layers=False)
  out = {name: value for name, value in params.items() if not name.startswith("layers_")}
  for layer in range(cfg.num_hidden_layers):
    (segment, block), index = locate(cfg, layer)
    weights = params[segment][block]
    if index is not None:
      weights = jax.tree.map(lambda w, i=index: w[i], weights)
    out[f"layers_{layer}"] = {"block_0": weights}
  return out, flat_cfg
