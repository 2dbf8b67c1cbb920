"""One forge for all tests of the agent: torch is imported once."""

from collections.abc import Iterator

import pytest

from tests.support.agent_runs import plain_environment
from tests.support.forge import Forge


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    forge = Forge(plain_environment())
    yield forge
    forge.close()
