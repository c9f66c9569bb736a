"""The living lecture: claims of five texts, each shown on the reader's own machine.

``gpuattn lecture`` runs the chapters, ``cNN_name.py``, and writes a page; each also runs by itself,
as ``python -m gpuattn.lecture.c22_hars``. Editors and Jupyter open them as notebooks of percent
cells.
"""

from gpuattn.lecture.harness.chapters import lecture

__all__ = ["lecture"]
