"""The training methods, one folder each."""
