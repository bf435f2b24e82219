"""Modules of the frozen program only: the check of the CPU and of the bundle itself. They import nothing of trivet."""
