"""Axes with sensible ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass


def nice_ticks(low: float, high: float, count: int = 6, whole: bool = False) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten) that cover [low, high]; needs low < high."""
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(1.0, step)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [_round(index * step, step) for index in range(start, stop + 1)]


def _round(value: float, step: float) -> float:
    return round(value, max(0, 2 - math.floor(math.log10(step))))


def tick_label(value: float) -> str:
    """Short: 12.5k, 3M, 0.25, 1e−5."""
    size = abs(value)
    if size >= 1e4:
        for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= unit:
                return f"{value / unit:.4g}{name}".replace("-", "−")
    text = f"{value:.4g}" if size >= 1e-3 or value == 0 else f"{value:.2g}"
    return text.replace("e-0", "e−").replace("-", "−")


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels; `ticks` are the values that get a line and a label.

    On a log axis zeros have a lane of their own at the very end, labelled 0: they are neither dropped nor moved.
    """

    low: float
    high: float
    ticks: list[float]
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if not self.log:
            share = (value - self.low) / (self.high - self.low)
        elif value <= 0:
            share = 0.0
        else:
            lane = 0.12
            low, high = math.log10(self.low), math.log10(self.high)
            share = lane + (1 - lane) * (math.log10(value) - low) / (high - low)
        return self.start + share * (self.end - self.start)


def linear_axis(values: list[float], start: float, end: float, from_zero: bool = True, whole: bool = False) -> Axis:
    """An axis over finite values, 0 included unless from_zero is false; all-zero or empty values give 0 to 1."""
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if low == high:
        # One level only: a span around it, so that the line is not on the frame.
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 10, high + abs(high) / 10)
    if not math.isfinite(high - low) or high - low < 1e-290:
        low, high = (low, low + 1e-280) if high - low < 1e-290 else (low / 4, high / 4)
    ticks = nice_ticks(low, high, whole=whole)
    return Axis(ticks[0], ticks[-1], ticks, start, end)


def log_axis(values: list[float], start: float, end: float) -> Axis:
    """Whole decades over the positive values (at least one of them), at most about six of them labelled."""
    positive = [value for value in values if value > 0]
    low = max(-300, math.floor(math.log10(min(positive))))
    high = min(308, max(low + 1, math.ceil(math.log10(max(positive)))))
    every = max(1, math.ceil((high - low) / 5))
    ticks = [0.0] + [10.0**power for power in range(low, high + 1, every)]
    return Axis(10.0**low, 10.0**high, ticks, start, end, log=True)
