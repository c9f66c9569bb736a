"""``python -m gpuattn``: the command line."""

from gpuattn.cli.main import main

main(prog_name="gpuattn")
