"""Loads of shared memory that an arrival at an mbarrier can overtake, found in machine code.

An arrival that frees memory can be seen before an earlier load from it has read, as the load may
wait behind loads of global memory; the next copy then overwrites what the load should find. The
memory is safe if the arrival, or an instruction before it, needs the loaded value.
"""

import re

import compiled

from gpuattn.cuda import sources

LOAD = re.compile(r"\b(?:LDS|LDSM)\b([.\w]*) R(\d+)\b")
WIDTHS = {"128": 4, "64": 2, "4": 4, "2": 2}  # last part of a load's name -> registers


def of_variant(file, arch, constants):
    """Return ``of`` each kernel of a variant, {kernel: (arrivals, overtaken loads)}."""
    text = sources.source_text(file, **constants)
    return {name: of(code) for name, code in compiled.instructions(text, arch, file).items()}


def of(instructions):
    """Return (number of arrivals, loads that an arrival can overtake) of a kernel.

    Arrivals are those without a count of bytes (``A1T0``), at barriers of this block or of another.
    The instructions are read in the order of their addresses, from load to arrival, and branches
    are not followed; what follows a jump without a condition is another path. All arrivals count,
    also at a barrier of other memory than that of the load: such an arrival has to stand before
    the load or behind a use of it.
    """
    arrivals, found, loads = 0, [], {}  # loads: first register -> (registers, text)
    for text in instructions:
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", text)]
        load = LOAD.search(text)
        width = WIDTHS.get(load[1].rsplit(".", 1)[-1], 1) if load else 0
        touched = {*registers, *(range(int(load[2]), int(load[2]) + width) if load else ())}
        for first, (count, _) in list(loads.items()):
            if touched.intersection(range(first, first + count)):
                del loads[first]
        if load:
            loads[int(load[2])] = width, text
        if "SYNCS.ARRIVE" in text and "A1T0" in text:
            arrivals += 1
            found += [text for _, text in loads.values()]
            loads.clear()
        elif re.match(r"(BRA|BRX|EXIT|RET)\b", text):
            loads.clear()
    return arrivals, found
