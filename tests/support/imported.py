"""What a new interpreter imports for some statements."""

import subprocess
import sys

CODE = """import sys
before = set(sys.modules)
{statements}
new = [name for name in sys.modules if name not in before]
others = {{name.partition(".")[0] for name in new}} - sys.stdlib_module_names
print(*sorted(others), sum(name.startswith("gpuattn") for name in new), file=sys.stderr)"""


def imported(statements):
    """Return (the packages, sorted, without the standard library; how many modules of gpuattn).

    Counted, not timed: the processor time depends on the machine and on what else it does.
    """
    command = [sys.executable, "-c", CODE.format(statements=statements)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    *packages, own = run.stderr.split()
    return packages, int(own)
