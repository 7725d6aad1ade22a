"""The trainer of forecasts; `jetdraft train forecast` loads its command from here."""

from jetdraft.train.forecast.forecast_verb import command

__all__ = ["command"]
