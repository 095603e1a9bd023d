"""Combines stages of a training loop: `serial` and `when`."""

from tekoa.extensions.serial import serial as serial
from tekoa.extensions.serial import when as when
