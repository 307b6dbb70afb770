"""Models: one file an architecture (`architectures/`), shared blocks beside them, weights in (`loading/`, `weights/`).

A model holds weights and nothing else: the cache is handed in with every step.
"""
