"""What the tests of the kernels share: each instruction set of this machine, numbers of threads, fewer examples.

HYPOTHESIS_PROFILE=short caps the examples of every property test here, also where a test asks for more: for builds
that are many times slower.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

SHORT_EXAMPLES = 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("HYPOTHESIS_PROFILE") != "short":
        return
    for item in items:
        test = getattr(item, "obj", None)
        wanted = getattr(test, "_hypothesis_internal_use_settings", None)
        if wanted is not None:
            test._hypothesis_internal_use_settings = settings(
                wanted,
                max_examples=min(wanted.max_examples, SHORT_EXAMPLES),
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )


@pytest.fixture
def native() -> Iterator[object]:
    """The extension; instruction set and number of threads are put back afterwards."""
    module = pytest.importorskip("octavo.ops.cpu._native", reason="this installation has no native kernels")
    isa, num_threads = module.isa(), module.num_threads()
    yield module
    module.use_isa(isa)
    module.set_num_threads(num_threads)
