"""How prompt tokens are trained: `jetdraft train ppd`."""

from dataclasses import dataclass

from jetdraft.checkpoints.streams import PromptSettings
from jetdraft.options import setting
from jetdraft.train.prompts import InsertionSettings, PromptTask


@dataclass(frozen=True)
class PpdSettings(InsertionSettings):
    """Settings of prompt tokens.

    gamma: Prompt tokens behind a row; each guesses one token further.
    members: Embeddings of each prompt token, whose guesses are averaged.
    """

    gamma: int = setting(PromptSettings.gamma, names=("--prompt-tokens",))
    members: int = setting(PromptSettings.members, names=("--ensemble",))


class PpdTask(PromptTask):
    """Prompt tokens, of which each can be an ensemble."""

    Settings = PpdSettings
    help = "Add prompt tokens to TARGET, a checkpoint folder or hub id."
    product = kind = "prompt tokens"
