"""Measuring models and the code that runs them."""
