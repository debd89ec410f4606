import pytest

from tests.train.small_run import write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
  """As for tests/train: a data folder that nobody may change."""
  return write_data(tmp_path_factory.mktemp("training"))
