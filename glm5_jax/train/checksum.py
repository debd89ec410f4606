"""A number per array that changes when any stored value does. Array files carry no checksum of their own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORDS = {1: jnp.uint8, 2: jnp.uint16}  # by bytes an element; wider elements are read as several uint32


def checksums(tree: Any) -> dict[str, int]:
  """By path ("params/embed"): the sum mod 2³² of a hash of each word of the array's bits and its index.

  The hash is one-to-one for a given index, so that a change of one word always shows. Integer sums do not
  depend on order, so the number is the same under every sharding: each device sums its own part, and one
  number a device travels. With several processes, all have to call this together. Blocks until computed.
  """
  sums = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    # One at a time: a CPU's fake devices share so few threads that several programs which each wait for all
    # devices can wait for each other for ever.
    value = jax.block_until_ready(_checksum(leaf))
    sums[jax.tree_util.keystr(path, simple=True, separator="/")] = int(value)
  return sums


def part_checksum(part: np.ndarray, start: tuple[int, ...], shape: tuple[int, ...]) -> int:
  """What a part adds to the checksum of its whole: over disjoint parts, these sum to it mod 2³².

  Args:
    part: a slice of an array of `shape`; `start` is where it begins there.
  """
  return int(_sum_of_hashes(jnp.asarray(part), np.array(start, np.uint32), shape))


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  return _sum_of_hashes(x, np.zeros(x.ndim, np.uint32), x.shape)


@functools.partial(jax.jit, static_argnums=2)
def _sum_of_hashes(x: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  words = jax.lax.bitcast_convert_type(x, _WORDS.get(x.dtype.itemsize, jnp.uint32)).astype(jnp.uint32)
  sizes = (*shape, *words.shape[x.ndim :])  # an axis more for elements of several words
  index = jnp.zeros(words.shape, jnp.uint32)
  for axis, size in enumerate(sizes):
    here = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    index = index * jnp.uint32(size) + (here + start[axis] if axis < x.ndim else here)
  return jnp.sum(_mix(words ^ _mix(index)), dtype=jnp.uint32)


def _mix(h: jax.Array) -> jax.Array:
  """The finaliser of MurmurHash3 (public domain, A. Appleby): a bijection of uint32."""
  h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
  return h ^ (h >> 16)
