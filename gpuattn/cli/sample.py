"""gpuattn sample: texts that a language model writes."""

import json
import time
from typing import Any

import click

from gpuattn.cli.shared.decoding import cache_options, loading_options
from gpuattn.cli.shared.options import COUNT, Parsed, PathName, run_argument
from gpuattn.cli.shared.streams import reading
from gpuattn.engine import MOST_PROPOSED, Speculation
from gpuattn.errors import DataError
from gpuattn.runs.loading import load_run
from gpuattn.tasks.users.sampler import TEMPERATURE
from gpuattn.units import number, whole

BETWEEN = "---"  # lines between texts


@click.command("sample")
@run_argument
@click.option("--prompt", default="", help="What the texts begin with.  [default: a new line]")
@click.option("--prompt-file", type=PathName(), metavar="FILE",
              help="Read the prompt from a UTF-8 file; -: standard input.")  # fmt: skip
@click.option("--tokens", type=COUNT, default=500, show_default=True, help="Tokens to generate.")
@click.option("--count", type=COUNT, default=1, show_default=True, help="How many texts.")
@click.option("--temperature", type=Parsed(number(0), "X"), default=TEMPERATURE, show_default=True,
              help="Below 1: favours probable tokens; 0: always the most probable.")  # fmt: skip
@click.option("--top-k", type=COUNT, help="Only the K most probable tokens; 1: greedy.")
@click.option("--top-p", type=Parsed(number(0, above=True, most=1), "P"), default=1.0,
              help="Of those, only the most probable that together reach P.")  # fmt: skip
@click.option("--min-p", type=Parsed(number(0, most=1), "P"), default=0.0,
              help="Of those, only tokens with P times the largest probability.")  # fmt: skip
@click.option("--seed", type=Parsed(whole(0), "N"), help="Makes the texts reproducible.")
@click.option("--speculate", type=Parsed(whole(1, MOST_PROPOSED), "N"),
              help="With --temperature 0: up to N tokens a step, 15 at most, where a text repeats "
                   "itself.")  # fmt: skip
@click.option("--stream", is_flag=True, help="Print the first text while it is generated.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each text.")
@cache_options
@loading_options
def command(
    folder: str,
    device: str,
    dtype: str,
    prompt: str,
    prompt_file: str | None,
    speculate: int | None,
    stream: bool,
    as_json: bool,
    no_kv_cache: bool,
    **settings: Any,
) -> None:
    """Continue a text with the language model in DIR: a run, or a folder of Hugging Face.

    \b
    gpuattn sample runs/book --prompt "It was" --tokens 200
    gpuattn sample runs/book --count 3 --top-p 0.9 --seed 1
    gpuattn sample runs/book --stream --tokens 5000

    With --json: text; score, the log-probability of the tokens behind the prompt at temperature 1;
    tokens, their number; time, the seconds that all texts took together; with --speculate also
    acceptance, the share of the proposed tokens that were right, of all texts.
    """
    if prompt and prompt_file:
        raise click.UsageError("--prompt and --prompt-file; accepted: one of them")
    if stream and as_json:
        raise click.UsageError("--stream and --json; accepted: one of them")
    speculation = Speculation(speculate) if speculate else None
    sampler = load_run(folder, device=device, dtype=dtype, task="language")
    prompt = _text_of(prompt_file) if prompt_file else prompt
    settings |= {"kv_cache": not no_kv_cache, "stream": _say if stream else None}
    settings["speculate"] = speculation
    begin = time.perf_counter()
    found = sampler.generate(prompt, **settings)
    if as_json:
        spent = round(time.perf_counter() - begin, 3)
        figures = {"time": spent}
        if speculation:
            figures["acceptance"] = round(speculation.acceptance, 4)
        for one in found:
            click.echo(json.dumps(one._asdict() | figures, ensure_ascii=False))
        return
    texts = [one.text for one in found]
    if stream:
        texts[0] = ""  # it is printed
    click.echo(f"\n{BETWEEN}\n".join(texts))


def _say(text):
    click.echo(text, nl=False)


def _text_of(path):
    with reading(path) as file:
        raw = file.read()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8, from byte {error.start + 1} on") from error
