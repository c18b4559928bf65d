"""hilore: plan which activations a GRPO update keeps, compresses or recomputes, and carry the plan out."""

__version__ = "0.1.0"
