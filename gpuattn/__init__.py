"""Attention, fused ops and autodiff for NumPy and CuPy arrays. This list is the public API."""
