"""Blocks -> ONNX. The only place of the exporters that knows onnx."""

from __future__ import annotations

from .builder import build_graph

__all__ = ["build_graph"]
