"""One page that compares training runs: tables, curves, evaluations and pictures from their folders."""
