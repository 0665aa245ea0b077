"""Native transcriptions of the step, each held to _rule by tests. triton.py is imported where a step first asks for it."""

from .cpu import available as available
from .cpu import build as build
from .cpu import load as load
