"""Runs that are stopped: when, and that they end with the bits of those that were not."""

from gpuattn.train import checkpoint


class After:
    """Says stop from the call with this number on."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self):
        self.left -= 1
        return self.left <= 0


def assert_same_bits(one, other, names=("state", "last", "best")):
    for name in names:
        a, b = (checkpoint.load(path, name)[0] for path in (one, other))
        assert a.keys() == b.keys()
        different = [key for key in a if a[key].tobytes() != b[key].tobytes()]
        assert different == [], name
