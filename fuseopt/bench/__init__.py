"""Benchmarks and the demo, on top of the rest of the package, which never imports them."""
