"""Native transcriptions of the step, each held to _rule by tests. Imported where a step first asks for one."""

from .cpu import available as available
from .cpu import build as build
from .cpu import load as load
