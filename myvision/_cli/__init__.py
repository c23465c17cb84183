"""The commands of ``python -m myvision``, a module each."""
