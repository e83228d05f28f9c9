"""The benchmark of the operators, run on the installed package: `python -m benchmarks --help`, or `nox -s bench`."""
