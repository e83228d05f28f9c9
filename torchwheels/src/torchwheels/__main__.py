"""`python -m torchwheels` is `torchwheels`."""

from torchwheels.cli import main

main()
