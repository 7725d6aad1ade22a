"""Heads that each guess one token further (Medusa, 2401.10774; Hydra, 2402.05109)."""

from jetdraft.runtime.proposers.drafter_methods import drafter_method, guess_proposer
from jetdraft.runtime.proposers.method import TreeOptions

METHOD = drafter_method(
    "medusa",
    "Medusa or Hydra heads on the target's last state",
    "heads of Medusa or Hydra",
    lambda contract, target: contract.guesses and not contract.block,
    make=guess_proposer,
    options=TreeOptions,
    alone={},
    module=(
        "jetdraft.methods.medusa.module:Medusa",
        "jetdraft.methods.medusa.module:Hydra",
    ),
    task="jetdraft.methods.medusa.task:MedusaTask",
)
