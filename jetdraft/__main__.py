"""python -m jetdraft is the jetdraft command."""

from jetdraft.cli import main

main()
