"""CUDA C++ to C++: asm statements become calls, shared arrays pointers, kernels launches."""

import itertools
import re

TOKEN = r'"(?:\\.|[^"\\])*"'
LAUNCH = """
extern "C" const char* launch_{name}(const unsigned* grid, unsigned threads, unsigned resident,
                                     size_t shared_bytes, unsigned seed, void** x) {{
    const uint3 blocks = {{grid[0], grid[1], grid[2]}};
    return machine::launch(blocks, threads, {cluster}, resident, shared_bytes, seed, [x] {{
        {name}({arguments});
    }});
}}"""


def translate(text, signatures):
    """Return preprocessed CUDA C++ as C++ with a function ``launch_NAME`` for each kernel.

    ``signatures``: the result of ``sources.signatures`` for the file.
    """
    parts, end = ['#include "kernel.h"\n'], 0
    for match in re.finditer(r"\basm\b\s*(?:volatile\s*)?(?=\()", text):
        close = _closing(text, match.end())
        parts += [text[end : match.start()], _call(text[match.end() + 1 : close])]
        end = close + 1
    text = "".join([*parts, text[end:]])
    text = re.sub(
        r"extern __shared__ (?:__align__\((\d+)\) )?([\w ]+) (\w+)\[\];",
        lambda m: f"{m[2]}* {m[3]} = ({m[2]}*)dynamic_shared_memory({m[1] or f'alignof({m[2]})'});",
        text,
    )
    static = r"__shared__ __align__\(\d+\) ([\w ]+) (\w+)\[(.*?)\];"
    if len(re.findall(static, text)) == 1:  # TMA may see it
        text = re.sub(static, r"auto& \2 = *(\1(*)[\3])static_shared_memory();", text)
    sites = itertools.count()

    def variables(m):
        align, kind, names = m.groups("")
        parts = []
        for name, size in re.findall(r"(\w+)((?:\[[^\]]*\])*)(?:, |$)", names):
            place = f"{next(sites)}, sizeof({kind}{size}), {align or f'alignof({kind})'}"
            parts.append(f"auto& {name} = *({kind}(*){size})shared_variable({place});")
        return " ".join(parts)

    one = r"\w+(?:\[[^\]]*\])*"
    declared = rf"__shared__ (?:__align__\((\d+)\) )?([\w ]+) ({one}(?:, {one})*);"
    text = re.sub(declared, variables, text)
    for name, parameters in signatures.items():
        arguments = ", ".join(f"*({kind}*)x[{n}]" for n, (kind, _) in enumerate(parameters))
        cluster = re.search(rf"__cluster_dims__\((\w+),[^)]*\)\s*{name}\(", text)
        text += LAUNCH.format(name=name, arguments=arguments, cluster=cluster[1] if cluster else 1)
    return text


def _closing(text, start):
    """Return the index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.compile(rf"{TOKEN}|[()]").finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if not depth:
            return match.start()
    raise ValueError("parentheses do not match")


def _call(inside):
    """Return an asm statement as a call: the instruction with its operands in their order."""
    sections = _sections(inside)
    template = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', sections[0]))
    if not template:  # a compiler barrier
        return "(void)0"
    given = [operand for section in sections[1:3] for operand in _operands(section)]
    operands = [given[int(n)] for n in re.findall(r"%(\d+)", template)]
    steps = [step.strip() for step in template.strip("{} ").split(";") if step.strip(" }")]
    steps = [re.sub(r"^@\w+ ", "", step).split()[0] for step in steps]
    auxiliary = re.compile(r"\.reg|setp|selp|mov\.")
    code = next((step for step in steps if not auxiliary.match(step)), steps[0])
    if found := re.match(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(\w+)", code):
        is_f16 = str(found[2] == "f16").lower()
        return f"wgmma_mma_async<{found[1]}>({', '.join([is_f16, *operands])})"
    return f"{re.sub(r'[^0-9a-zA-Z]+', '_', code)}({', '.join(operands)})"


def _sections(inside):
    """Return the parts between colons: template, outputs, inputs, clobbers."""
    parts, depth = [""], 0
    for token in re.findall(rf"{TOKEN}|[()\[\]:]|[^\"()\[\]:]+", inside):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token, 0)
        if token == ":" and not depth:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def _operands(section):
    found, at = [], 0
    while match := re.compile(r'\s*,?\s*"[=+]?\w"\s*(?=\()').match(section, at):
        at = _closing(section, match.end()) + 1
        found.append(section[match.end() : at])
    return found
