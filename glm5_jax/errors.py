"""Errors that a user can cause. Commands print them as one line and exit with code 2."""


class UserError(Exception):
  """Names what is wrong, where, and what would be right. Never wraps a bug of ours."""
