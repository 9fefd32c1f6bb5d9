"""Each method written the obvious way: what tests and benchmarks hold the fast one to."""
