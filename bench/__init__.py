"""Benchmarks of this machine: ``python -m bench``. Not part of the installed package."""
