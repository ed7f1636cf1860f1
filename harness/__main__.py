"""`python -m harness`: the command line. It knows nothing itself."""

from harness.cli import main

main()
