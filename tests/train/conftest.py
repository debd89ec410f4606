import pytest

from tests.train.small_run import write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
  """A data folder, shared: nobody may change it."""
  return write_data(tmp_path_factory.mktemp("training"))
