"""Numbers as people read them."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
  """Bytes in the unit that leaves one to four digits before the point: "95.74 GiB"."""
  amount, unit = float(count), 0
  while abs(amount) >= 1024 and unit < len(_UNITS) - 1:
    amount, unit = amount / 1024, unit + 1
  return f"{amount:,.2f} {_UNITS[unit]}" if unit else f"{amount:,.0f} B"


def seconds(value: float) -> str:
  """ "12.3 s", "4.56 ms" or "78.9 µs"."""
  for factor, unit in ((1, "s"), (1e3, "ms")):
    if value * factor >= 1:
      return f"{value * factor:,.3g} {unit}"
  return f"{value * 1e6:,.3g} µs"


def si(value: float) -> str:
  """Thousands in steps: "1.23e+09" is written "1.23 G"."""
  for factor, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(value) >= factor:
      return f"{value / factor:,.3g} {unit}"
  return f"{value:,.3g}"
