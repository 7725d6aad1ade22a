"""How forecasts are trained: `jetdraft train forecast`."""

from dataclasses import dataclass

from jetdraft.checkpoints.streams import FORECAST
from jetdraft.options import setting
from jetdraft.train.prompts import InsertionSettings, PromptTask


@dataclass(frozen=True)
class ForecastSettings(InsertionSettings):
    gamma: int = setting(4, "Forecasts behind a row; each guesses one token further.")
    prefix: int = setting(16, "Rows of the learned prefix, which forecasts alone see.")


class ForecastTask(PromptTask):
    """Prompt tokens that see a learned prefix in each layer."""

    Settings = ForecastSettings
    help = "Add forecasts to TARGET, a checkpoint folder or hub id."
    product = kind = "forecasts"
    mode = FORECAST
