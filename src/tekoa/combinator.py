"""Puts stages together."""

from tekoa.extensions.base import serial as serial
from tekoa.extensions.base import when as when
