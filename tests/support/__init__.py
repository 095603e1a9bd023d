"""Shared by the tests of several folders: a tiny model, real processes, TensorBoard, figures."""
