"""Adapters to trainers; each imports its trainer, so none is imported by ``hilore.runtime`` itself."""
