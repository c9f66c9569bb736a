"""Plans of calls that belong to a block alone."""

import contextlib
from unittest import mock

from gpuattn.autodiff import plans


@contextlib.contextmanager
def separate_plans():
    """Keep the plans of a block, as of a test that patches modules, apart from all others."""
    try:
        with mock.patch.object(plans, "table", plans.Table()):
            _forget_last_forms()
            yield
    finally:
        _forget_last_forms()


def _forget_last_forms():
    for op in plans.ops:
        op.forget()
