"""Trajectories of a frozen masked diffusion model: how they are made, and the files that hold them."""
