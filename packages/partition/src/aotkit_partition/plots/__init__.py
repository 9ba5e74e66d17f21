"""Plots of a partition as SVG text, and the report as one HTML page. Nothing is loaded from elsewhere."""

from .cut import cut_svg
from .front import front_svg
from .memory import memory_svg
from .page import html_report

__all__ = ["cut_svg", "front_svg", "html_report", "memory_svg"]
