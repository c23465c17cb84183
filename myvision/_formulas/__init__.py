"""Naive, readable, differentiable oracles in plain torch, one per operator."""
